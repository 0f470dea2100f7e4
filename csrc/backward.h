// Backward in tiles of 16 query rows by the keys that any of them attends to, which neighbouring rows largely share: the
// four products of softmax's backward pass, on those keys alone. First by rows (the scores' gradients, and dq), then by
// keys: dk and dv take up the tiles in the order of the rows, so that no result depends on the number of threads.
#pragma once
#include "forward.h"
#include "lists.h"
#include "row_gradients.h"
#include "tiles.h"
#include "unions.h"
#include "values.h"

namespace selectivit {
namespace {

// Survivors of a unit: those saved, or found again.
template <class S, class P>
int gather_unit(const Attention& a, int64_t index, HeadState* state, SavedUnit* found) {
  if (a.saved) {
    *found = saved_unit(a, index);
    if (found->start[0] != kSearchAgain) return kDone;
  }
  void* memory = room(kLists, saved_unit_bytes(a.n, a.m));
  if (!memory) return kNoMemory;
  const Unit unit = unit_at(a, index);
  *found = saved_unit_at(a, memory);
  Sink sink = sink_of(*found);
  const int status = Forward<S, P>(a, state).run(unit, nullptr, nullptr, &sink);
  if (status != kDone) return status;
  finish(*found, sink, unit.end - unit.begin);
  return sink.bad ? kDeclined : kDone;
}

// p and the slopes of 16 rows at n keys, in place of u; and each row's mean of dp under its slopes.
// Where a row's u is 0 its dp counts for nothing, be it NaN.
template <class S, class P>
inline void slopes_and_means(const P& power, int64_t n, const float* dp, float* u_p, float* slopes, float* means) {
  using F = typename S::F;
  for (int c = 0; c < kBlockRows; c += S::W) {
    F weights = S::zero(), weighted = S::zero();
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) {
      const F u = S::load(u_p + j), s = power.slope(u);
      S::store(slopes + j, s);
      S::store(u_p + j, s * u);
      weights = weights + s;
      weighted = S::fma(s, S::where_positive(s, S::load(dp + j)), weighted);
    }
    S::store(means + c, S::where_positive(weights, weighted / weights));
  }
}

// The gradients of the scores, in place of dp.
template <class S>
inline void score_gradients(int64_t n, const float* slopes, const float* means, const float* scales, float* dp_ds) {
  using F = typename S::F;
  for (int c = 0; c < kBlockRows; c += S::W) {
    const F mean = S::load(means + c), scale = S::load(scales + c);
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) {
      const F s = S::load(slopes + j);
      S::store(dp_ds + j, S::where_positive(s, s * (S::load(dp_ds + j) - mean) * scale));
    }
  }
}

constexpr float kFull = 0.3f;  // share of a block's union that is attended to, from which dense products pay

template <class S, class P>
class BackwardRows {
 public:
  BackwardRows(const Attention& a, const AttentionGradients& g, int64_t index, const SavedUnit& saved)
      : a_(a), g_(g), unit_(unit_at(a, index)), saved_(saved), power_(a.alpha), eps_(a.alpha - 1) {}

  int run(UnitLists* lists) {
    slopes_ = static_cast<float*>(room(kValues, (a_.m + kSpareKeys) * (kBlockRows + 1) * sizeof(float)));
    if (!slopes_) return kNoMemory;
    entries_ = slopes_ + (a_.m + kSpareKeys) * kBlockRows;
    int64_t at = 0;
    int b = 0;
    for (int64_t row = unit_.begin; row < unit_.end; row += kBlockRows, ++b) {
      lists->start[b] = at;
      const int rows = static_cast<int>(unit_.end - row < kBlockRows ? unit_.end - row : kBlockRows);
      Union keys = {lists->keys + at, lists->marks + at, lists->p + at * kBlockRows, nullptr, 0};
      lists->sparse[b] = find_keys(row, rows, &keys);
      if (keys.n < 0) return kNoMemory;
      block(row, rows, keys, lists->sparse[b], lists->ds + at * kBlockRows);
      at += keys.n;
    }
    lists->start[b] = at;
    return kDone;
  }

 private:
  // Returns whether the block is sparse.
  bool find_keys(int64_t row, int rows, Union* keys) {
    const int64_t first = row - unit_.begin;
    if (saved_.start[0] != kThresholdsOnly) {
      union_of_lists<S>(saved_, first, rows, a_.m, keys);
      const int64_t entries = saved_.start[first + rows] - saved_.start[first];
      return static_cast<float>(entries) < kFull * static_cast<float>(keys->n * kBlockRows);
    }
    RowThreshold thresholds[kBlockRows];
    for (int r = 0; r < rows; ++r) thresholds[r] = saved_threshold(saved_, first + r);
    turn_queries(row, rows);
    union_of_scores<S>(a_, unit_.head, row, rows, thresholds, turned_, eps_, keys);
    return false;
  }

  void block(int64_t row, int rows, const Union& keys, bool sparse, float* ds) {
    const int64_t head = unit_.head, n = keys.n;
    float* p = keys.u;
    if (sparse) value_products_of_entries(row, rows, keys, ds);
    else value_products(row, rows, keys.keys, n, ds);
    alignas(64) float means[kBlockRows], scales[kBlockRows] = {}, ones[kBlockRows], alphas[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) ones[r] = 1;
    for (int r = 0; r < rows; ++r) scales[r] = row_scale(a_, head, row + r);
    slopes_and_means<S>(power_, n, ds, p, slopes_, means);
    if (saved_.start[0] == kThresholdsOnly) renormalise<S>(power_, n, p, slopes_);
    if (g_.dalpha) {
      alpha_gradients<S>(n, slopes_, p, ds, eps_, alphas);
      std::memcpy(g_.dalpha + head * a_.n + row, alphas, rows * sizeof(float));
    }
    score_gradients<S>(n, slopes_, means, g_.dscale ? ones : scales, ds);
    if (sparse) query_gradients_of_entries(row, rows, keys, ds);
    else query_gradients(rows, keys.keys, ds, n);
    if (g_.dscale) {
      const float* q = a_.q + offset(a_.q_stride, a_, head) + row * a_.q_stride[2];
      for (int r = 0; r < rows; ++r)
        g_.dscale[head * a_.n + row + r] = scale_gradient<S>(q + r * a_.q_stride[2], rows_ + r * a_.d, a_.d, scales[r]);
      scale_tile<S>(ds, n, scales);
    }
    std::memcpy(g_.dq + (head * a_.n + row) * a_.d, rows_, rows * a_.d * sizeof(float));
  }

  // dO . v of 16 rows at n keys.
  void value_products(int64_t row, int rows, const int32_t* keys, int64_t n, float* dp) {
    const float* v = a_.v + offset(a_.v_stride, a_, unit_.head);
    const float* grad = g_.grad + offset(g_.grad_stride, a_, unit_.head) + row * g_.grad_stride[2];
    turn_rows<S>(grad, g_.grad_stride[2], rows, a_.e, turned_);
    for (int64_t j = 0; j < n; j += kKeysAtOnce<S>) {
      const float* x[kKeysAtOnce<S>];
      for (int i = 0; i < kKeysAtOnce<S>; ++i) x[i] = v + keys[j + i < n ? j + i : n - 1] * a_.v_stride[2];
      dot_tile<S>(x, turned_, a_.e, dp + j * kBlockRows);
    }
  }

  void value_products_of_entries(int64_t row, int rows, const Union& keys, float* dp) {
    const float* v = a_.v + offset(a_.v_stride, a_, unit_.head);
    const float* grad = g_.grad + offset(g_.grad_stride, a_, unit_.head) + row * g_.grad_stride[2];
    const int64_t* start = saved_.start + (row - unit_.begin);
    for (int r = 0; r < rows; ++r) {
      const int n = static_cast<int>(start[r + 1] - start[r]);
      const int32_t* places = keys.places + (start[r] - start[0]);
      dot_rows<S>(grad + r * g_.grad_stride[2], saved_.index + start[r], n, v, a_.v_stride[2], a_.e, entries_);
      for (int i = 0; i < n; ++i) dp[places[i]] = entries_[i];
    }
  }

  void query_gradients_of_entries(int64_t row, int rows, const Union& keys, const float* ds) {
    const float* k = a_.k + offset(a_.k_stride, a_, unit_.head);
    const int64_t* start = saved_.start + (row - unit_.begin);
    for (int r = 0; r < rows; ++r) {
      const int n = static_cast<int>(start[r + 1] - start[r]);
      const int32_t* places = keys.places + (start[r] - start[0]);
      for (int i = 0; i < n; ++i) entries_[i] = ds[places[i]];
      mix_rows<S>(entries_, saved_.index + start[r], n, k, a_.k_stride[2], a_.d, 1, rows_ + r * a_.d);
    }
  }

  // As the forward pass scales them, so that the scores come out the same.
  void turn_queries(int64_t row, int rows) {
    const float* q = a_.q + offset(a_.q_stride, a_, unit_.head) + row * a_.q_stride[2];
    for (int r = 0; r < rows; ++r) {
      const typename S::F factor = S::set(row_scale(a_, unit_.head, row + r) * eps_);
      for (int64_t c = 0; c < a_.d; c += S::W)
        S::store(rows_ + r * a_.d + c, S::load(q + r * a_.q_stride[2] + c) * factor);
    }
    turn_rows<S>(rows_, a_.d, rows, a_.d, turned_);
  }

  // dq of 16 rows, into rows_.
  void query_gradients(int rows, const int32_t* keys, const float* ds, int64_t n) {
    const float* k = a_.k + offset(a_.k_stride, a_, unit_.head);
    const int64_t stride = a_.k_stride[2];
    std::memset(rows_, 0, kBlockRows * a_.d * sizeof(float));
    for (int64_t j = 0; j < n; j += kNearKeys)
      for (int r = 0; r < rows; r += kSums<S>) {
        float* to[kSums<S>];
        for (int i = 0; i < kSums<S>; ++i) to[i] = rows_ + (r + i) * a_.d;
        add_rows<S>(
            to, a_.d, n - j < kNearKeys ? n - j : kNearKeys,
            [&](int i, int64_t s) { return ds[(j + s) * kBlockRows + r + i]; },
            [&](int64_t s) { return k + keys[j + s] * stride; });
      }
  }

  const Attention& a_;
  const AttentionGradients& g_;
  const Unit unit_;
  const SavedUnit& saved_;
  const P power_;
  const float eps_;
  float* slopes_ = nullptr;
  float* entries_ = nullptr;  // of one row
  alignas(64) float turned_[kMaxWidth * kBlockRows];
  alignas(64) float rows_[kMaxWidth * kBlockRows];
};

template <class S, class P>
int backward_rows(const Attention& a, const AttentionGradients& g, int64_t index, HeadState* state, UnitLists* lists) {
  SavedUnit saved = {};
  const int status = gather_unit<S, P>(a, index, state, &saved);
  return status == kDone ? BackwardRows<S, P>(a, g, index, saved).run(lists) : status;
}

// Adds a block's tiles to dk and dv, for the entries [at, end) of its keys.
template <class S>
inline void add_block(const Attention& a, const AttentionGradients& g, int64_t head, int64_t row, int rows,
                      const UnitLists& lists, int64_t at, int64_t end) {
  const float* q = a.q + offset(a.q_stride, a, head) + row * a.q_stride[2];
  const float* grad = g.grad + offset(g.grad_stride, a, head) + row * g.grad_stride[2];
  for (int64_t j = at; j < end; j += kSums<S>) {
    float *dk[kSums<S>], *dv[kSums<S>];
    int64_t from[kSums<S>];
    for (int i = 0; i < kSums<S>; ++i) {  // past the last key the last again: the same sum is written twice
      from[i] = (j + i < end ? j + i : end - 1) * kBlockRows;
      const int64_t key = head * a.m + lists.keys[from[i] / kBlockRows];
      dk[i] = g.dk + key * a.d;
      dv[i] = g.dv + key * a.e;
    }
    add_rows<S>(
        dv, a.e, rows, [&](int i, int64_t r) { return lists.p[from[i] + r]; },
        [&](int64_t r) { return grad + r * g.grad_stride[2]; });
    add_rows<S>(
        dk, a.d, rows, [&](int i, int64_t r) { return lists.ds[from[i] + r]; },
        [&](int64_t r) { return q + r * a.q_stride[2]; });
  }
}

// The same by single entries: a product with 0 that is left out changes nothing.
template <class S>
inline void add_entries(const Attention& a, const AttentionGradients& g, int64_t head, int64_t row,
                        const UnitLists& lists, int64_t at, int64_t end) {
  const float* q = a.q + offset(a.q_stride, a, head) + row * a.q_stride[2];
  const float* grad = g.grad + offset(g.grad_stride, a, head) + row * g.grad_stride[2];
  for (int64_t j = at; j < end; ++j) {
    const int64_t key = head * a.m + lists.keys[j];
    const MarkedSum dv = {g.dv + key * a.e, lists.p + j * kBlockRows, grad, g.grad_stride[2]};
    const MarkedSum dk = {g.dk + key * a.d, lists.ds + j * kBlockRows, q, a.q_stride[2]};
    add_marked<S>(lists.marks[j] & 0xffff, dv, a.e, dk, a.d);
  }
}

// dk and dv of keys [begin, end) of a head take up what one of its units adds to them; its first one finds zeros.
template <class S>
int backward_keys(const Attention& a, const AttentionGradients& g, int64_t index, int64_t begin, int64_t end,
                  const UnitLists& lists) {
  const Unit unit = unit_at(a, index);
  if (unit.begin == 0) {
    std::memset(g.dk + (unit.head * a.m + begin) * a.d, 0, (end - begin) * a.d * sizeof(float));
    std::memset(g.dv + (unit.head * a.m + begin) * a.e, 0, (end - begin) * a.e * sizeof(float));
  }
  const int64_t blocks = (unit.end - unit.begin + kBlockRows - 1) / kBlockRows;
  int64_t next[kUnitRows / kBlockRows];
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t low = lists.start[b], high = lists.start[b + 1];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (lists.keys[middle] < begin) low = middle + 1;
      else high = middle;
    }
    next[b] = low;
  }
  // stretches of keys of which a block attends to about kNearKeys
  const int64_t stretch = kNearKeys * a.m * blocks / (lists.start[blocks] + 1) + 1;
  for (int64_t j = begin; j < end; j += stretch) {
    const int64_t until = j + stretch < end ? j + stretch : end;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = next[b], row = unit.begin + b * kBlockRows;
      while (next[b] < lists.start[b + 1] && lists.keys[next[b]] < until) ++next[b];
      const int rows = static_cast<int>(unit.end - row < kBlockRows ? unit.end - row : kBlockRows);
      if (lists.sparse[b]) add_entries<S>(a, g, unit.head, row, lists, at, next[b]);
      else if (at < next[b]) add_block<S>(a, g, unit.head, row, rows, lists, at, next[b]);
    }
  }
  return kDone;
}

}  // namespace
}  // namespace selectivit
