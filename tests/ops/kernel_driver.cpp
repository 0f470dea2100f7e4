// Runs the library without Python, for processors that are only emulated: one problem from a file, results to another.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "problem.h"

using namespace selectivit;

extern "C" {
int32_t selectivit_forward(const Attention*, int32_t which);
int32_t selectivit_backward(const Attention*, const AttentionGradients*, int32_t which);
int32_t selectivit_entmax_rows(const Rows*, int32_t which);
int64_t selectivit_saved_bytes(int64_t heads, int64_t n, int64_t m);
}

struct Header {
  int64_t heads, n, m, d, e, mask_kind, gradients, threads;  // heads = 0: rows of scores, (n, m)
  float alpha, scale;
};

FILE *in, *out;

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(count + 16);
  if (std::fread(values.data(), sizeof(T), count, in) != static_cast<size_t>(count)) std::exit(3);
  return values;
}
void write(const std::vector<float>& values, int64_t count) { std::fwrite(values.data(), sizeof(float), count, out); }

int rows(const Header& h) {
  const std::vector<float> scores = read<float>(h.n * h.m);
  std::vector<float> p(h.n * h.m + 16), tau(h.n + 16);
  const Rows call = {scores.data(), p.data(), tau.data(), h.n, h.m, h.m, h.alpha, static_cast<int32_t>(h.threads)};
  const int status = selectivit_entmax_rows(&call, 0);
  write(p, h.n * h.m);
  return status;
}

int attention(const Header& h) {
  const int64_t nd = h.n * h.d, md = h.m * h.d, me = h.m * h.e, ne = h.n * h.e;
  const std::vector<float> q = read<float>(h.heads * nd), k = read<float>(h.heads * md), v = read<float>(h.heads * me);
  const std::vector<char> mask = read<char>(h.mask_kind == kNoMask ? 0 : h.n * h.m * (h.mask_kind == kFloatMask ? 4 : 1));
  const std::vector<float> grad = read<float>(h.gradients ? h.heads * ne : 0);
  std::vector<float> o(h.heads * ne + 16), tau(h.heads * h.n + 16);
  std::vector<char> saved(h.gradients ? selectivit_saved_bytes(h.heads, h.n, h.m) + 64 : 64);
  Attention a = {};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.out = o.data(), a.tau_out = tau.data();
  a.q_stride[1] = nd, a.q_stride[2] = h.d, a.k_stride[1] = md, a.k_stride[2] = h.d, a.v_stride[1] = me, a.v_stride[2] = h.e;
  a.mask = mask.data(), a.mask_stride[2] = h.m, a.mask_stride[3] = 1, a.mask_kind = static_cast<int32_t>(h.mask_kind);
  a.batch = 1, a.heads = h.heads, a.n = h.n, a.m = h.m, a.d = h.d, a.e = h.e;
  a.alpha = h.alpha, a.scale = h.scale, a.screen = 1, a.threads = static_cast<int32_t>(h.threads);
  if (h.gradients) a.saved = saved.data(), a.saved_bytes = static_cast<int64_t>(saved.size());
  int status = selectivit_forward(&a, 0);
  write(o, h.heads * ne);
  if (!h.gradients || status) return status;
  std::vector<float> dq(h.heads * nd + 16), dk(h.heads * md + 16), dv(h.heads * me + 16);
  const AttentionGradients g = {grad.data(), {0, ne, h.e}, dq.data(), dk.data(), dv.data()};
  status = selectivit_backward(&a, &g, 0);
  write(dq, h.heads * nd), write(dk, h.heads * md), write(dv, h.heads * me);
  return status;
}

int main(int, char** files) {
  in = std::fopen(files[1], "rb"), out = std::fopen(files[2], "wb");
  if (!in || !out) return 4;
  const Header h = read<Header>(1)[0];
  const int status = h.heads ? attention(h) : rows(h);
  return std::fclose(out) ? 5 : status;
}
