// Where the forward pass puts a unit's survivors and thresholds for the backward pass.
#pragma once
#include "saved.h"

namespace selectivit {
namespace {

struct Sink {
  int64_t* start = nullptr;
  float* u = nullptr;
  int32_t* index = nullptr;
  int64_t used = 0, capacity = 0;
  bool full = false, bad = false;  // bad: a row of NaN
  RowThreshold rows[kUnitRows] = {};
};

inline Sink sink_of(const SavedUnit& saved) {
  Sink sink;
  sink.start = saved.start;
  sink.u = saved.u;
  sink.index = saved.index;
  sink.capacity = saved.capacity;
  sink.start[0] = 0;
  return sink;
}
inline void finish(const SavedUnit& saved, const Sink& sink, int64_t rows) {
  if (sink.bad) saved.start[0] = kSearchAgain;
  else if (sink.full) save_thresholds(saved, sink.rows, rows);
}

}  // namespace
}  // namespace selectivit
