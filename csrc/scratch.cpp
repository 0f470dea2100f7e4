#include "scratch.h"

#include <cstdlib>

namespace selectivit {
namespace {

constexpr size_t kKeep = 8u << 20;

struct Rooms {
  void* memory[kRooms] = {};
  size_t bytes[kRooms] = {};
  ~Rooms() {
    for (void* m : memory) std::free(m);
  }
};
thread_local Rooms rooms;

}  // namespace

void* room(Room which, size_t bytes) {
  if (bytes > rooms.bytes[which] || !rooms.memory[which]) {
    std::free(rooms.memory[which]);
    const size_t whole = (bytes + 128 + 63) / 64 * 64;
    rooms.memory[which] = std::aligned_alloc(64, whole);
    rooms.bytes[which] = rooms.memory[which] ? bytes : 0;
  }
  return rooms.memory[which];
}

void trim_rooms() {
  for (int r = 0; r < kRooms; ++r) {
    if (rooms.bytes[r] <= kKeep) continue;
    std::free(rooms.memory[r]);
    rooms.memory[r] = nullptr;
    rooms.bytes[r] = 0;
  }
}

}  // namespace selectivit
