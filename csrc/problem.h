// What one call is asked to do. Plain data, mirrored field by field in ops/kernels/structs.py.
#pragma once
#include <cstdint>

namespace selectivit {

enum MaskKind : int32_t { kNoMask = 0, kBoolMask = 1, kFloatMask = 2 };

// Strides count elements. Batch and head strides may be 0 (broadcast); the last dim of q, k, v is contiguous.
struct Attention {
  const float* q;          // (B, H, N, D)
  const float* k;          // (B, H, M, D)
  const float* v;          // (B, H, M, E)
  const void* mask;        // (B, H, N, M): uint8 (1 = may attend) or float (added)
  const float* scale_rows; // (B, H, N), or null: `scale` holds for every row
  const float* alphas;     // (B, H), or null: `alpha` holds for every head
  float* out;              // (B, H, N, E), contiguous
  float* tau_out;          // (B, H, N), contiguous: tau
  void* saved;             // survivors for the backward pass (saved.h), or null
  int64_t q_stride[3];     // B, H, N
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t mask_stride[4];  // B, H, N, M; the last is 0 or 1
  int64_t scale_stride[3];
  int64_t alpha_stride[2]; // B, H
  int64_t batch, heads, n, m, d, e;
  int64_t saved_bytes;
  float scale;
  float alpha;
  int32_t mask_kind;
  int32_t screen;          // 0: full-precision scores only
  int32_t threads;
};

// The backward pass reads the forward's problem again (out and saved included) and writes dense gradients.
struct AttentionGradients {
  const float* grad;       // (B, H, N, E)
  int64_t grad_stride[3];
  float* dq;               // (B, H, N, D), contiguous
  float* dk;               // (B, H, M, D), contiguous
  float* dv;               // (B, H, M, E), contiguous
  float* dalpha;           // (B, H, N), contiguous: each row's share, or null
  float* dscale;           // (B, H, N), contiguous, or null
};

struct Rows {
  const float* scores;     // (rows, n), rows `stride` apart
  float* p;                // (rows, n), contiguous
  float* tau_out;            // (rows)
  int64_t rows, n, stride;
  float alpha;
  int32_t threads;
};

constexpr int kBlockRows = 16;   // query rows that share one pass over the keys
constexpr int kPanelKeys = 32;   // keys in one packed panel
constexpr int kLanes = 32;       // running maxima per row
constexpr int kMaxWidth = 256;   // of a head

// A work unit: some query rows of one head. Its size depends on the shapes alone, so results never depend on threads.
struct Unit {
  int64_t head;            // batch * heads + head
  int64_t begin, end;      // query rows
};

constexpr int kUnitRows = 128;   // at most

inline int64_t unit_rows(int64_t n) {
  const int64_t pieces = (n + kUnitRows - 1) / kUnitRows;
  const int64_t rows = (n + pieces - 1) / pieces;
  return (rows + kBlockRows - 1) / kBlockRows * kBlockRows;
}
inline int64_t units_per_head(int64_t n) { return (n + unit_rows(n) - 1) / unit_rows(n); }
inline Unit unit_at(const Attention& a, int64_t index) {
  const int64_t per_head = units_per_head(a.n), rows = unit_rows(a.n);
  const int64_t begin = index % per_head * rows;
  return {index / per_head, begin, begin + rows < a.n ? begin + rows : a.n};
}

inline int64_t offset(const int64_t* stride, const Attention& a, int64_t head) {
  return head / a.heads * stride[0] + head % a.heads * stride[1];
}
inline float row_scale(const Attention& a, int64_t head, int64_t row) {
  return a.scale_rows ? a.scale_rows[offset(a.scale_stride, a, head) + row * a.scale_stride[2]] : a.scale;
}
// The problem as a unit's head sees it: `alpha` is its own.
inline Attention of_unit(const Attention& a, int64_t index) {
  Attention own = a;
  if (a.alphas) own.alpha = a.alphas[offset(a.alpha_stride, a, unit_at(a, index).head)];
  return own;
}
inline int64_t padded_keys(int64_t m) { return (m + kPanelKeys - 1) / kPanelKeys * kPanelKeys; }
// Rows of a block lie this far apart: a power of two would put all of them into the same few lines of the cache.
inline int64_t strip_width(int64_t m) { return padded_keys(m) + 16; }

}  // namespace selectivit
