// Forward: blocks of 16 query rows. Scores of a block -> lane maxima -> thresholds -> survivors -> sparse P.V.
#pragma once
#include "saved.h"
#include "scratch.h"
#include "threshold.h"
#include "values.h"
#ifdef __AVX512VNNI__
#include "screen_avx512.h"
#endif

namespace selectivit {
namespace {

constexpr float kDense = 0.25f;   // share of survivors above which the screen no longer pays
constexpr float kSparse = 0.12f;  // and below which it pays again

enum Status { kDone = 0, kDeclined = 1, kNoMemory = 2 };

// The head a thread works on, packed as far as it was needed.
struct HeadState {
  int64_t head = -1;
  KeyNorms norms = {};
  bool panels = false, screen = false;
#ifdef __AVX512VNNI__
  ScreenKeys screen_keys = {};
#endif
};

// Where a row's survivors go for the backward pass.
struct Sink {
  int64_t* start = nullptr;
  float* u = nullptr;
  int32_t* index = nullptr;
  int64_t used = 0, capacity = 0;
  bool full = false;
};

template <class S, class P>
class Forward {
 public:
  Forward(const Attention& a, HeadState* state) : a_(a), power_(a.alpha), eps_(a.alpha - 1), state_(*state) {}

  // out may be null: then only the survivors are wanted (the backward pass, for what was not saved).
  int run(const Unit& unit, float* out, float* sigma, Sink* sink) {
    unit_ = unit;
    out_ = out;
    sigma_ = sigma;
    sink_ = sink;
    if (!prepare()) return failure_;
    bool dense = !S::kScreen || !a_.screen || a_.mask_kind != kNoMask;
    for (int64_t row = unit.begin; row < unit.end; row += kBlockRows) {
      if (!load_queries(row)) return kDeclined;
      const int rows = static_cast<int>(unit.end - row < kBlockRows ? unit.end - row : kBlockRows);
      int64_t survivors = 0;
      int done = 0;
      if (!dense) done = screened_rows(row, rows, &survivors);
      if (done < rows) {
        if (!panels()) return failure_;
        float_rows(row, done, rows, &survivors);
      }
      const float share = static_cast<float>(survivors) / static_cast<float>(rows * a_.m);
      if (S::kScreen && a_.screen && a_.mask_kind == kNoMask) dense = share > (dense ? kSparse : kDense);
    }
    return kDone;
  }

 private:
  bool fail(int why) {
    failure_ = why;
    return false;
  }

  bool prepare() {
    k_ = a_.k + offset(a_.k_stride, a_, unit_.head);
    v_ = a_.v + offset(a_.v_stride, a_, unit_.head);
    q_from_ = a_.q + offset(a_.q_stride, a_, unit_.head);
    if (state_.head != unit_.head) {
      state_ = HeadState();
      state_.head = unit_.head;
      state_.norms = key_norms<S>(k_, a_.k_stride[2], a_.m, a_.d);
    }
    if (!(state_.norms.norm < 1e18f)) return fail(kDeclined);
    const int64_t width = padded_keys(a_.m);
    strip_ = static_cast<float*>(room(kStrip, width * kBlockRows * sizeof(float)));
    values_ = static_cast<float*>(room(kValues, width * sizeof(float)));
    indices_ = static_cast<int32_t*>(room(kIndices, width * sizeof(float)));
    return (strip_ && values_ && indices_) || fail(kNoMemory);
  }

  bool panels() {
    float* memory = static_cast<float*>(room(kPanels, padded_keys(a_.m) * a_.d * sizeof(float)));
    if (!memory) return fail(kNoMemory);
    if (!state_.panels) pack_panels<S>(k_, a_.k_stride[2], a_.m, a_.d, memory);
    state_.panels = true;
    panels_ = memory;
    return true;
  }

  // Queries times scale and eps; rows past the unit's last repeat it, which is harmless and branch-free.
  bool load_queries(int64_t row) {
    float check = 0;
    for (int r = 0; r < kBlockRows; ++r) {
      const int64_t i = row + r < unit_.end ? row + r : unit_.end - 1;
      const float factor = row_scale(a_, unit_.head, i) * eps_;
      const float* from = q_from_ + i * a_.q_stride[2];
      typename S::F s = S::zero();
      for (int64_t c = 0; c < a_.d; c += S::W) {
        const typename S::F x = S::load(from + c) * S::set(factor);
        S::store(q_ + r * kMaxWidth + c, x);
        s = S::fma(x, x, s);
      }
      check += S::sum(s) * 0;
    }
    return check == 0;
  }

  int screened_rows(int64_t row, int rows, int64_t* survivors) {
#ifdef __AVX512VNNI__
    int32_t* keys = static_cast<int32_t*>(room(kScreenKeys, padded_keys(a_.m) * screen_width(a_.d) * 2));
    if (!keys) return 0;
    if (!state_.screen) state_.screen_keys = pack_screen(k_, a_.k_stride[2], a_.m, a_.d, state_.norms, keys);
    state_.screen = true;
    int32_t* strip = reinterpret_cast<int32_t*>(strip_);
    quantize_queries(q_, a_.d, state_.screen_keys, &screen_rows_);
    screen_block(screen_rows_, keys, a_.m, a_.d, strip, lanes_);
    lane_thresholds<S>(power_, lanes_, &thresholds_);
    for (int r = 0; r < rows; ++r) {
      const float bound = screen_rows_.bound[r], least = thresholds_.top[r] + thresholds_.tau[r] - bound;
      const int n = screen_survivors(strip + r * padded_keys(a_.m), a_.m, least - bound, screen_rows_.unit[r], indices_);
      dot_rows<S>(q_ + r * kMaxWidth, indices_, n, k_, a_.k_stride[2], a_.d, values_);
      finish_row(row + r, n, least);
      *survivors += n;
      if (static_cast<float>(*survivors) > kDense * static_cast<float>(a_.m * (r + 3))) return r + 1;
    }
#else
    (void)row, (void)survivors, (void)rows;
#endif
    return rows;
  }

  void float_rows(int64_t row, int done, int rows, int64_t* survivors) {
    const int64_t width = padded_keys(a_.m);
    score_block<S>(q_, panels_, a_.m, a_.d, strip_, lanes_);
    bool bad[kBlockRows] = {};
    if (a_.mask_kind != kNoMask)
      for (int r = 0; r < rows; ++r)
        bad[r] = mask_row<S>(a_, unit_.head, row + r, strip_ + r * width, eps_, lanes_ + r * kLanes);
    lane_thresholds<S>(power_, lanes_, &thresholds_);
    for (int r = done; r < rows; ++r) {
      if (bad[r] || thresholds_.top[r] == kMinusInf) {
        edge_row(row + r, bad[r]);
        continue;
      }
      const float least = thresholds_.top[r] + thresholds_.tau[r];
      const typename S::F t = S::set(least);
      const float* strip = strip_ + r * width;
      int n = 0;
      for (int64_t j = 0; j < width; j += S::W)
        n = S::keep_above(S::load(strip + j), t, static_cast<int32_t>(j), values_, indices_, n);
      finish_row(row + r, n, least);
      *survivors += n;
    }
  }

  // A row with nothing to attend to gives zeros; one with NaN or +inf in its mask gives NaN.
  void edge_row(int64_t row, bool bad) {
    const int64_t at = unit_.head * a_.n + row;
    if (out_)
      for (int64_t c = 0; c < a_.e; ++c) out_[at * a_.e + c] = bad ? NAN : 0.0f;
    if (sigma_) sigma_[at] = bad ? NAN : 0.0f;
    if (sink_ && bad) sink_->full = true;
    if (sink_ && sink_->start) sink_->start[row - unit_.begin + 1] = sink_->used;
  }

  void finish_row(int64_t row, int n, float least) {
    float top = values_[0];
    for (int j = 1; j < n; ++j) top = values_[j] > top ? values_[j] : top;
    for (int j = 0; j < n; j += S::W) S::store(values_ + j, S::load(values_ + j) - S::set(top));
    const float start = least - top;
    const Solution found = newton<S>(power_, values_, n, start > -1 ? start : -1.0f);
    float* u = sink_ ? reserve(n) : nullptr;
    const int kept = probabilities<S>(power_, values_, indices_, n, found.threshold, u);
    const int64_t at = unit_.head * a_.n + row;
    if (sink_) keep(row, kept, found.sum, u);
    if (sigma_) sigma_[at] = found.threshold + 1;
    if (out_) mix_rows<S>(values_, indices_, kept, v_, a_.v_stride[2], a_.e, 1 / found.sum, out_ + at * a_.e);
  }

  float* reserve(int n) {
    if (sink_->full || sink_->used + n + S::W > sink_->capacity) {
      sink_->full = true;
      return nullptr;
    }
    return sink_->u + sink_->used;
  }

  void keep(int64_t row, int kept, float sum, float* u) {
    if (!u) return;
    const float norm = power_.inverse_norm(sum);
    for (int j = 0; j < kept; ++j) u[j] *= norm;
    std::memcpy(sink_->index + sink_->used, indices_, kept * sizeof(int32_t));
    sink_->used += kept;
    sink_->start[row - unit_.begin + 1] = sink_->used;
  }

  const Attention& a_;
  const P power_;
  const float eps_;
  HeadState& state_;
  Unit unit_ = {};
  int failure_ = kDone;
  const float *k_ = nullptr, *v_ = nullptr, *q_from_ = nullptr, *panels_ = nullptr;
  float *strip_ = nullptr, *values_ = nullptr, *out_ = nullptr, *sigma_ = nullptr;
  int32_t* indices_ = nullptr;
  Sink* sink_ = nullptr;
  alignas(64) float q_[kBlockRows * kMaxWidth];
  alignas(64) float lanes_[kBlockRows * kLanes];
  LaneThresholds thresholds_;
#ifdef __AVX512VNNI__
  ScreenRows screen_rows_;
#endif
};

template <class S, class P>
int forward_unit(const Attention& a, int64_t index, HeadState* state) {
  const Unit unit = unit_at(a, index);
  Forward<S, P> forward(a, state);
  if (!a.saved) return forward.run(unit, a.out, a.sigma, nullptr);
  const SavedUnit saved = saved_unit(a, index);
  Sink sink{saved.start, saved.u, saved.index, 0, saved.capacity, false};
  sink.start[0] = 0;
  const int status = forward.run(unit, a.out, a.sigma, &sink);
  if (sink.full) saved.start[0] = -1;
  return status;
}

}  // namespace
}  // namespace selectivit
