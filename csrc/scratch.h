// Memory of one thread: grows, is reused between calls, and is released with the thread.
#pragma once
#include <cstddef>

namespace selectivit {

enum Room { kScreenKeys, kPanels, kStrip, kValues, kIndices, kLists, kRooms };

// At least `bytes`, aligned to 64 and with 128 bytes of slack for full-vector stores; contents undefined.
// Throws nothing: returns null where memory is out.
void* room(Room which, size_t bytes);
// Frees what outgrows 8 MB, so that one long call does not hold its memory for ever.
void trim_rooms();

}  // namespace selectivit
