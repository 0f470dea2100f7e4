// What the backward pass knows of a unit's survivors; entries of row r lie at start[r] .. start[r + 1].
#pragma once
#include <cstdint>

namespace selectivit {

struct UnitLists {
  const int64_t* start = nullptr;
  const float* u = nullptr;
  const int32_t* index = nullptr;
  float* p = nullptr;       // owned, with ds behind it
  float* ds = nullptr;      // gradient of the scores, times the row's scale
  void* owned = nullptr;    // the lists themselves, where they were not saved
};

}  // namespace selectivit
