// Logits to the weights of a law, in place: two passes over a row while it lies in the level-2 cache.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "pool.hpp"
#include "vectors.hpp"

namespace leadout {

constexpr int kLawBlock = 512;

inline __mmask16 mask_of(int left) {
  return left >= kLanes ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1 << left) - 1);
}

// Row of f32[vocab] with `stride` >= round up to 512 (or = vocab, if that is a multiple): exp((logit - largest) /
// temperature), 0 beyond `vocab`; sums of blocks of 512 and their total. Temperature 0: weight 1 on the lowest id of
// the largest.
inline void law_row(float* row, int vocab, int blocks, double temperature, float* sums, double* total) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 most[4] = {lowest, lowest, lowest, lowest};
  int v = 0;
  for (; v + 4 * kLanes <= vocab; v += 4 * kLanes)
    for (int k = 0; k < 4; ++k) most[k] = _mm512_max_ps(most[k], _mm512_loadu_ps(row + v + k * kLanes));
  for (; v < vocab; v += kLanes)
    most[0] = _mm512_max_ps(most[0], _mm512_mask_loadu_ps(lowest, mask_of(vocab - v), row + v));
  const float largest = _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
  const __m512 shift = _mm512_set1_ps(largest);
  const bool greedy = temperature == 0.0, plain = temperature == 1.0;
  const __m512 heat = _mm512_set1_ps(static_cast<float>(greedy ? 1.0 : temperature));
  bool found = false;
  double all = 0.0;
  for (int b = 0; b < blocks; ++b) {
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int k = 0; k < kLawBlock / kLanes; ++k) {
      const int at = b * kLawBlock + k * kLanes;
      const __mmask16 in = mask_of(vocab - at);
      const __m512 x = _mm512_maskz_loadu_ps(in, row + at);
      __m512 e;
      if (greedy) {
        const unsigned hits = found ? 0 : _mm512_mask_cmp_ps_mask(in, x, shift, _CMP_EQ_OQ);
        found = found || hits;
        e = _mm512_maskz_mov_ps(static_cast<__mmask16>(hits & -hits), _mm512_set1_ps(1.0f));
      } else {
        __m512 d = _mm512_sub_ps(x, shift);
        if (!plain) d = _mm512_div_ps(d, heat);
        e = _mm512_maskz_mov_ps(in, exp512(d));
      }
      _mm512_storeu_ps(row + at, e);
      sum[k & 1] = _mm512_add_ps(sum[k & 1], e);
    }
    sums[b] = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
    all += sums[b];
  }
  *total = all;
}

// The token whose slice of the cumulative distribution holds the uniform; never one of zero weight.
inline int64_t draw_row(const float* row, int blocks, const float* sums, double uniform) {
  double all = 0.0;
  for (int b = 0; b < blocks; ++b) all += sums[b];
  const double target = uniform * all;
  double before = 0.0, cumulative = 0.0;
  int block = 0;
  for (int b = 0; b < blocks; ++b) {
    if (sums[b] > 0.0f) block = b, before = cumulative;
    cumulative += sums[b];
    if (cumulative > target && sums[b] > 0.0f) break;
  }
  const float* weights = row + static_cast<int64_t>(block) * kLawBlock;
  int last = 0;
  cumulative = 0.0;
  for (int k = 0; k < kLawBlock; ++k) {
    cumulative += weights[k];
    if (weights[k] > 0.0f) {
      last = k;
      if (cumulative > target - before) break;
    }
  }
  return static_cast<int64_t>(block) * kLawBlock + last;
}

// (p - q)+ of one position into `out`, with its block sums; p itself if less than `least` of it is left.
inline void residual_row(const float* row, int blocks, double total, const float* q, int num_q, const int64_t* ids,
                         double least, float* out, float* sums) {
  const int width = blocks * kLawBlock;
  const __m512 whole = _mm512_set1_ps(static_cast<float>(total));
  for (int v = 0; v < width; v += kLanes) _mm512_storeu_ps(out + v, _mm512_div_ps(_mm512_loadu_ps(row + v), whole));
  if (ids)
    for (int i = 0; i < num_q; ++i) out[ids[i]] -= q[i];
  else
    for (int i = 0; i < num_q; ++i) out[i] -= q[i];
  double left = 0.0;
  for (int b = 0; b < blocks; ++b) {
    __m512 sum = _mm512_setzero_ps();
    for (int v = b * kLawBlock; v < (b + 1) * kLawBlock; v += kLanes) {
      const __m512 rest = _mm512_max_ps(_mm512_loadu_ps(out + v), _mm512_setzero_ps());
      _mm512_storeu_ps(out + v, rest);
      sum = _mm512_add_ps(sum, rest);
    }
    sums[b] = _mm512_reduce_add_ps(sum);
    left += sums[b];
  }
  if (left >= least) return;
  for (int b = 0; b < blocks; ++b) {
    __m512 sum = _mm512_setzero_ps();
    for (int v = b * kLawBlock; v < (b + 1) * kLawBlock; v += kLanes) {
      const __m512 p = _mm512_div_ps(_mm512_loadu_ps(row + v), whole);
      _mm512_storeu_ps(out + v, p);
      sum = _mm512_add_ps(sum, p);
    }
    sums[b] = _mm512_reduce_add_ps(sum);
  }
}

// A round of B rows with up to K sampled drafts each, to be judged: position n of row b is law b (K + 1) + n.
struct Judgement {
  const float* weights;  // f32[X, stride] with `blocks` sums f32 and a total f64 each
  const float* sums;
  const double* totals;
  const int64_t *tokens, *counts;  // i64[B, K], i64[B]
  const float* q;                  // f32[B, K, num_q]
  const int64_t *columns, *ids;    // i64[B, K] of q; i64[num_q] policy ids, or null: the first num_q
  const double *accept, *correct, *draw;  // f64[B, width]: uniforms by purpose and position
  int64_t *accepted, *next;               // i64[B]
  double least;                           // of a residual, else the law itself
  int64_t stride, width;
  int32_t blocks, batch, drafts, num_q, vocab;
};

// A token, column or count out of range; all is well; a probability or logit that is not finite.
enum Judged { kOutside = 0, kRight = 1, kNotFinite = 2 };

// The rule of `leadout.rollout.accept` for one row, unless a token or column is out of range or a q is not finite.
inline Judged judge_row(const Judgement& j, int b) {
  const int count = static_cast<int>(j.counts[b]);
  if (count < 0 || count > j.drafts) return kOutside;
  for (int k = 0; k < count; ++k) {
    const float* q = j.q + (static_cast<int64_t>(b) * j.drafts + k) * j.num_q;
    __m512 sum = _mm512_setzero_ps();
    for (int v = 0; v < j.num_q; v += kLanes) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask_of(j.num_q - v), q + v));
    if (!std::isfinite(_mm512_reduce_add_ps(sum))) return kNotFinite;
  }
  int kept = 0;
  for (; kept < count; ++kept) {
    const int64_t y = static_cast<int64_t>(b) * j.drafts + kept, x = y + b, token = j.tokens[y], column = j.columns[y];
    if (token < 0 || token >= j.vocab || column < 0 || column >= j.num_q) return kOutside;
    const double p = static_cast<double>(j.weights[x * j.stride + token]) / j.totals[x];
    const double q = static_cast<double>(j.q[y * j.num_q + column]);
    if (!(j.accept[b * j.width + kept] * q < p)) break;
  }
  j.accepted[b] = kept;
  const int64_t y = static_cast<int64_t>(b) * j.drafts + kept, x = y + b;
  const float* row = j.weights + x * j.stride;
  if (kept == count) {
    j.next[b] = draw_row(row, j.blocks, j.sums + x * j.blocks, j.draw[b * j.width + kept]);
    return kRight;
  }
  thread_local std::vector<float> left, left_sums;
  left.resize(static_cast<size_t>(j.blocks) * kLawBlock);
  left_sums.resize(j.blocks);
  residual_row(row, j.blocks, j.totals[x], j.q + y * j.num_q, j.num_q, j.ids, j.least, left.data(), left_sums.data());
  j.next[b] = draw_row(left.data(), j.blocks, left_sums.data(), j.correct[b * j.width + kept]);
  return kRight;
}

// Philox4x32-10 (Salmon et al., SC 2011): 53 random bits of the first two words, in [0, 1).
inline double philox_uniform(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return static_cast<double>(static_cast<uint64_t>(c0) << 21 | c1 >> 11) * 0x1p-53;
}

}  // namespace leadout
