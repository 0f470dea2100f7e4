// Forward: blocks of 16 query rows. Scores of a block -> lane maxima -> thresholds -> survivors -> sparse P.V.
#pragma once
#include "scratch.h"
#include "sink.h"
#include "threshold.h"
#include "values.h"
#include "whole.h"
#ifdef SELECTIVIT_SCREEN  // the header of this kernel's screen
#include SELECTIVIT_SCREEN
#endif

namespace selectivit {
namespace {

constexpr float kDense = 0.12f;   // share of survivors above which the screen no longer pays
constexpr float kSparse = 0.07f;  // and below which it pays again

constexpr int64_t kManyValues = 5;  // survivors of a row per near stretch of keys, for which stretches pay

constexpr float kWideSupport = 0.3f;  // eps below which rows rarely are so sparse: no screen until one block was

enum Status { kDone = 0, kDeclined = 1, kNoMemory = 2 };

// The head a thread works on, packed as far as it was needed.
struct HeadState {
  int64_t head = -1;
  KeyNorms norms = {};
  bool panels = false, screen = false, values_known = false, values_finite = false;
#ifdef SELECTIVIT_SCREEN
  ScreenKeys screen_keys = {};
#endif
};

template <class S, class P>
class Forward {
 public:
  Forward(const Attention& a, HeadState* state) : a_(a), power_(a.alpha), eps_(a.alpha - 1), state_(*state) {}

  // out may be null: then only the survivors are wanted (the backward pass, for what was not saved).
  int run(const Unit& unit, float* out, float* tau_out, Sink* sink) {
    unit_ = unit;
    out_ = out;
    tau_out_ = tau_out;
    sink_ = sink;
    if (!prepare()) return failure_;
    bool dense = !S::kScreen || !a_.screen || a_.mask_kind != kNoMask || eps_ < kWideSupport;
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
    list_ = strip_width(a_.m);
    strip_ = static_cast<float*>(room(kStrip, list_ * kBlockRows * sizeof(float)));
    values_ = static_cast<float*>(room(kValues, list_ * kBlockRows * sizeof(float)));
    indices_ = static_cast<int32_t*>(room(kIndices, list_ * kBlockRows * sizeof(float)));
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
#ifdef SELECTIVIT_SCREEN
    int32_t* keys = static_cast<int32_t*>(room(kScreenKeys, screen_bytes(a_.m, a_.d)));
    if (!keys) return 0;
    if (!state_.screen) state_.screen_keys = pack_screen(k_, a_.k_stride[2], a_.m, a_.d, state_.norms, keys);
    state_.screen = true;
    in_list_ = 0;
    ScreenScore* strip = reinterpret_cast<ScreenScore*>(strip_);
    quantize_queries(q_, a_.d, state_.screen_keys, &screen_rows_);
    screen_block(screen_rows_, keys, a_.m, a_.d, strip, lanes_);
    lane_thresholds<S>(power_, lanes_, &thresholds_);
    for (int r = 0; r < rows; ++r) {
      const float bound = screen_rows_.bound[r], least = thresholds_.top[r] + thresholds_.tau[r] - bound;
      const int n = screen_survivors(screen_rows_, r, strip + r * list_, a_.m, least - bound, indices_);
      dot_rows<S>(q_ + r * kMaxWidth, indices_, n, k_, a_.k_stride[2], a_.d, values_);
      const float top = relative_to_top<S>(values_, n);
      solve_row(row + r, r, n, least - top, top);
      mix_row(row, r, values_, indices_);
      *survivors += n;
      if (static_cast<float>(*survivors) > kDense * static_cast<float>(a_.m * (r + 3))) return r + 1;
    }
#else
    (void)row, (void)survivors, (void)rows;
#endif
    return rows;
  }

  void float_rows(int64_t row, int done, int rows, int64_t* survivors) {
    in_list_ = 1;
    score_block<S>(q_, panels_, a_.m, a_.d, strip_, lanes_);
    bool bad[kBlockRows] = {};
    if (a_.mask_kind != kNoMask)
      for (int r = 0; r < rows; ++r)
        bad[r] = mask_row<S>(a_, unit_.head, row + r, strip_ + r * list_, eps_, lanes_ + r * kLanes);
    lane_thresholds<S>(power_, lanes_, &thresholds_);
    int64_t kept = 0;
    const bool whole = takes_whole(done, rows);
    for (int r = done; r < rows; ++r) {
      kept_[r] = 0;
      if (bad[r] || thresholds_.top[r] == kMinusInf) {
        edge_row(row, r, bad[r]);
        if (whole) std::memset(strip_ + r * list_, 0, a_.m * sizeof(float));
        continue;
      }
      if (whole) {
        solve_whole(row + r, r);
        *survivors += a_.m;
        continue;
      }
      const int n = collect(r);
      solve_row(row + r, r, n, thresholds_.tau[r], thresholds_.top[r]);
      *survivors += n;
      kept += kept_[r];
    }
    if (!out_) return;
    if (whole) {
      mix_whole<S>(strip_, list_, done, rows, a_.m, v_, a_.v_stride[2], a_.e, factors_,
                   out_ + (unit_.head * a_.n + row) * a_.e);
      return;
    }
    const bool many = kept > (rows - done) * kManyValues * (a_.m * a_.e * 4 / kNearBytes);
    if (many && a_.e % (4 * S::W) == 0)
      mix_block<S>(values_ + done * list_, indices_ + done * list_, list_, kept_ + done, rows - done, a_.m, v_,
                   a_.v_stride[2], a_.e, factors_ + done, out_ + (unit_.head * a_.n + row + done) * a_.e);
    else
      for (int r = done; r < rows; ++r) mix_row(row, r, values_ + r * list_, indices_ + r * list_);
  }

  // Judged by two rows. A NaN in v must not reach rows that give it no weight: then by lists.
  bool takes_whole(int done, int rows) {
    const int some[2] = {done, (done + rows) / 2};
    int64_t n = 0;
    for (int r : some) n += count_above<S>(strip_ + r * list_, a_.m, thresholds_.top[r], thresholds_.tau[r]);
    if (static_cast<float>(n) < 2 * kWhole * static_cast<float>(a_.m)) return false;
    if (!state_.values_known) state_.values_finite = key_norms<S>(v_, a_.v_stride[2], a_.m, a_.e).norm < 1e18f;
    state_.values_known = true;
    return state_.values_finite;
  }

  void solve_whole(int64_t row, int r) {
    const float start = thresholds_.tau[r], top = thresholds_.top[r];
    float sum;
    const float threshold = whole_row<S>(power_, strip_ + r * list_, a_.m, top, start > -1 ? start : -1.0f, &sum);
    factors_[r] = 1 / sum;
    if (tau_out_) tau_out_[unit_.head * a_.n + row] = threshold;
    if (!sink_) return;
    sink_->full = true;
    sink_->rows[row - unit_.begin] = {top, threshold, power_.inverse_norm(sum)};
  }

  // Entries of the strip that may lie in the support, less the greatest, with their indices. The greatest is taken off
  // before tau is compared: in a sum with scores beyond 2^24 tau would vanish.
  int collect(int r) {
    const typename S::F top = S::set(thresholds_.top[r]), tau = S::set(thresholds_.tau[r]);
    const float* strip = strip_ + r * list_;
    float* values = values_ + r * list_;
    int32_t* indices = indices_ + r * list_;
    const int64_t width = padded_keys(a_.m);
    int n = 0;
    for (int64_t j = 0; j < width; j += S::W)
      n = S::keep_above(S::load(strip + j) - top, tau, static_cast<int32_t>(j), values, indices, n);
    return n;
  }

  // A row with nothing to attend to gives zeros; one with NaN or +inf in its mask gives NaN.
  void edge_row(int64_t block, int r, bool bad) {
    const int64_t row = block + r, at = unit_.head * a_.n + row;
    factors_[r] = bad ? NAN : 0.0f;  // times a sum of nothing
    if (tau_out_) tau_out_[at] = bad ? NAN : 0.0f;
    if (!sink_) return;
    if (bad) sink_->bad = true;
    sink_->start[row - unit_.begin + 1] = sink_->used;
    sink_->rows[row - unit_.begin] = {0, __builtin_inff(), 0};
  }

  // From n candidates less `top` in list r (the screen uses the first for every row) to p, its factor and tau_out.
  void solve_row(int64_t row, int r, int n, float start, float top) {
    const int64_t at = unit_.head * a_.n + row, list = in_list_ * r * list_;
    float* values = values_ + list;
    const float threshold = newton<S>(power_, values, n, start > -1 ? start : -1.0f);
    float* u = sink_ ? reserve(n) : nullptr;
    float sum;
    kept_[r] = probabilities<S>(power_, values, indices_ + list, n, threshold, u, &sum);
    factors_[r] = 1 / sum;
    if (sink_) {
      sink_->rows[row - unit_.begin] = {top, threshold, power_.inverse_norm(sum)};
      keep(row, indices_ + list, kept_[r], u);
    }
    if (tau_out_) tau_out_[at] = threshold;
  }

  void mix_row(int64_t row, int r, const float* values, const int32_t* indices) {
    if (out_)
      mix_rows<S>(values, indices, kept_[r], v_, a_.v_stride[2], a_.e, factors_[r], out_ + (unit_.head * a_.n + row + r) * a_.e);
  }

  float* reserve(int n) {
    if (sink_->full || sink_->used + n + S::W > sink_->capacity) {
      sink_->full = true;
      return nullptr;
    }
    return sink_->u + sink_->used;
  }

  void keep(int64_t row, const int32_t* indices, int kept, float* u) {
    if (!u) return;
    const float norm = sink_->rows[row - unit_.begin].norm;
    for (int j = 0; j < kept; ++j) u[j] *= norm;
    std::memcpy(sink_->index + sink_->used, indices, kept * sizeof(int32_t));
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
  float *strip_ = nullptr, *values_ = nullptr, *out_ = nullptr, *tau_out_ = nullptr;
  int32_t* indices_ = nullptr;
  int in_list_ = 0;             // 1: every row has its own list; 0: they take turns in the first
  int64_t list_ = 0;            // distance of two rows' lists, and of two rows of the strip
  int kept_[kBlockRows] = {};
  float factors_[kBlockRows] = {};
  Sink* sink_ = nullptr;
  alignas(64) float q_[kBlockRows * kMaxWidth];
  alignas(64) float lanes_[kBlockRows * kLanes];
  LaneThresholds thresholds_;
#ifdef SELECTIVIT_SCREEN
  ScreenRows screen_rows_;
#endif
};

template <class S, class P>
int forward_unit(const Attention& a, int64_t index, HeadState* state) {
  const Unit unit = unit_at(a, index);
  Forward<S, P> forward(a, state);
  if (!a.saved) return forward.run(unit, a.out, a.tau_out, nullptr);
  const SavedUnit saved = saved_unit(a, index);
  Sink sink = sink_of(saved);
  const int status = forward.run(unit, a.out, a.tau_out, &sink);
  finish(saved, sink, unit.end - unit.begin);
  return status;
}

}  // namespace
}  // namespace selectivit
