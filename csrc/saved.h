// Survivors (key index and u) kept for the backward pass. The room is a function of the shapes, so that a compiled
// graph knows it; pages that are never written cost no memory. A unit whose survivors outgrow its share keeps its rows'
// thresholds instead: the backward pass computes its scores again, which so many survivors make cheaper than lists.
#pragma once
#include <cstring>

#include "problem.h"

namespace selectivit {

struct SavedUnit {
  int64_t* start;   // per row and one more: first entry within the unit; start[0] may say otherwise
  float* u;
  int32_t* index;
  int64_t capacity;
};

constexpr int64_t kSearchAgain = -1;     // in start[0]: nothing is known of the unit
constexpr int64_t kThresholdsOnly = -2;  // the survivors did not fit

// u = ((z - top) - tau)+ * norm. A row that attends to nothing has tau = +inf.
struct RowThreshold {
  float top, tau, norm;
};

// A larger share of short rows: they are the denser ones, and their lists are small.
inline int64_t saved_row_capacity(int64_t m) {
  const int64_t part = m <= 512 ? 2 : m <= 2048 ? 4 : 8, share = (m + part - 1) / part;
  const int64_t least = m < 48 ? m : 48;
  return share > least ? share : least;
}

inline int64_t saved_unit_bytes(int64_t n, int64_t m) {
  const int64_t rows = unit_rows(n);
  return ((rows + 1) * 8 + rows * saved_row_capacity(m) * 8 + 63) / 64 * 64;
}
inline int64_t saved_total_bytes(int64_t heads, int64_t n, int64_t m) {
  return heads * units_per_head(n) * saved_unit_bytes(n, m);
}

inline SavedUnit saved_unit_at(const Attention& a, void* memory) {
  const int64_t rows = unit_rows(a.n);
  char* base = static_cast<char*>(memory);
  const int64_t capacity = rows * saved_row_capacity(a.m);
  char* entries = base + (rows + 1) * 8;
  return {reinterpret_cast<int64_t*>(base), reinterpret_cast<float*>(entries),
          reinterpret_cast<int32_t*>(entries + capacity * 4), capacity};
}
inline SavedUnit saved_unit(const Attention& a, int64_t unit) {
  return saved_unit_at(a, static_cast<char*>(a.saved) + unit * saved_unit_bytes(a.n, a.m));
}

// In the memory of the lists: every row has eight bytes of start and at least one u.
inline void save_thresholds(const SavedUnit& saved, const RowThreshold* rows, int64_t n) {
  saved.start[0] = kThresholdsOnly;
  for (int64_t r = 0; r < n; ++r) {
    std::memcpy(saved.start + r + 1, rows + r, 8);
    saved.u[r] = rows[r].norm;
  }
}
inline RowThreshold saved_threshold(const SavedUnit& saved, int64_t r) {
  RowThreshold row;
  std::memcpy(&row, saved.start + r + 1, 8);
  row.norm = saved.u[r];
  return row;
}

}  // namespace selectivit
