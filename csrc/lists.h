// What the backward pass by keys knows of a unit: for each block of 16 query rows the keys that any of them attends to,
// and tiles of p and of the scores' gradients, 16 rows a key.
#pragma once
#include <cstdint>

#include "problem.h"

namespace selectivit {

struct UnitLists {
  int32_t* keys = nullptr;  // ascending within a block; block b lies at start[b] .. start[b + 1]
  uint32_t* marks = nullptr;  // of a key; bit r: row r attends to it
  float* p = nullptr;       // 16 rows a key
  float* ds = nullptr;      // the same; gradient of q . k, the row's scale in it
  int64_t start[kUnitRows / kBlockRows + 1] = {};
  bool sparse[kUnitRows / kBlockRows] = {};  // blocks that go by single entries
};

constexpr int64_t kSpareKeys = 16;  // products are computed several keys at a time, past the last

inline int64_t unit_list_keys(const Attention& a) { return unit_rows(a.n) / kBlockRows * a.m + kSpareKeys; }
inline int64_t unit_list_bytes(const Attention& a) {
  return (unit_list_keys(a) * (8 + 2 * kBlockRows * 4) + 63) / 64 * 64;
}
inline UnitLists unit_lists(const Attention& a, void* memory) {
  UnitLists lists;
  lists.p = static_cast<float*>(memory);
  lists.ds = lists.p + unit_list_keys(a) * kBlockRows;
  lists.keys = reinterpret_cast<int32_t*>(lists.ds + unit_list_keys(a) * kBlockRows);
  lists.marks = reinterpret_cast<uint32_t*>(lists.keys + unit_list_keys(a));
  return lists;
}

}  // namespace selectivit
