// The policy's head in the train stage: logits, log-probabilities of given tokens, and the way back.
//
// Operands are bfloat16, sums and logits float32. Going back, a slice of the vocabulary at a time goes from logits to
// both gradients while it lies in the cache: neither probabilities nor gradients of the logits exist for all of it.
#pragma once
#include <cmath>

#include "panels.hpp"

namespace leadout {

class OutputHead {
 public:
  // hidden f32[R, H], weight f32[V, H] -> f32[R, V]
  void logits(Pool& pool, const float* hidden, const float* weight, int rows, int size, int vocab, float* out) {
    bf16* low = low_.reserve(static_cast<size_t>(rows) * padded(size));
    narrow(pool, hidden, rows, size, low);
    pack_columns(pool, weight_, size, vocab, [&](int c) {
      return c < vocab ? weight + static_cast<size_t>(c) * size : nullptr;
    });
    multiply(pool, low, padded(size), rows, weight_, nullptr, [&](int j, int row0, int count, const float* y) {
      for (int r = 0; r < count; ++r)
        for (int c = j * kColumns; c < std::min(vocab, (j + 1) * kColumns); c += kLanes)
          _mm512_mask_storeu_ps(out + static_cast<size_t>(row0 + r) * vocab + c, lanes_left(vocab - c),
                                _mm512_load_ps(y + r * kColumns + c - j * kColumns));
    });
  }

  // Of softmax(logits / temperature): log-probability of a target, entropy, log of the normalizer; f32[R] each.
  static void law(Pool& pool, const float* logits, int rows, int vocab, float temperature, const int64_t* targets,
                  float* logprobs, float* entropies, float* normalizers) {
    pool.run(rows, [&](int r, int) {
      const float* row = logits + static_cast<size_t>(r) * vocab;
      const __m512 minus = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(1.0f / temperature);
      __m512 most = minus, total = _mm512_setzero_ps(), weighted = total;
      for (int c = 0; c < vocab; c += kLanes)
        most = _mm512_max_ps(most, _mm512_mask_loadu_ps(minus, lanes_left(vocab - c), row + c));
      const float top = _mm512_reduce_max_ps(most);
      const __m512 shift = _mm512_set1_ps(top);
      for (int c = 0; c < vocab; c += kLanes) {
        const __mmask16 in = lanes_left(vocab - c);
        const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_mask_loadu_ps(shift, in, row + c), shift), factor);
        const __m512 e = _mm512_maskz_mov_ps(in, exp512(x));
        total = _mm512_add_ps(total, e);
        weighted = _mm512_fmadd_ps(e, x, weighted);
      }
      const float sum = _mm512_reduce_add_ps(total), log_sum = std::log(sum);
      logprobs[r] = (row[targets[r]] - top) / temperature - log_sum;
      entropies[r] = log_sum - _mm512_reduce_add_ps(weighted) / sum;
      normalizers[r] = top / temperature + log_sum;
    });
  }

  // slopes f32[R] of the targets' log-probabilities -> dhidden f32[R, H] and, added where `add`, dweight f32[V, H] (or
  // null): d logprob / d logits = (onehot(target) - softmax(logits / temperature)) / temperature.
  void back(Pool& pool, const float* hidden, const float* weight, const float* logits, int rows, int size, int vocab,
            float temperature, const int64_t* targets, const float* normalizers, const float* slopes, float* dhidden,
            float* dweight, bool add) {
    if (dweight)
      pack_rows(pool, hidden_, rows, size, [&](int r, int c) { return _mm512_loadu_ps(hidden + static_cast<size_t>(r) * size + c); });
    bf16* slice = slice_.reserve(static_cast<size_t>(rows) * padded(kSlice));
    bf16* turned = turned_.reserve(static_cast<size_t>(kSlice) * padded(rows));
    for (int first = 0; first < vocab; first += kSlice) {
      const int count = std::min(kSlice, vocab - first), wide = round_up(count, kLanes);
      slopes_of(pool, logits + first, rows, vocab, first, count, temperature, targets, normalizers, slopes, slice);
      pack_rows(pool, weight_, count, size, [&](int r, int c) {
        return _mm512_loadu_ps(weight + static_cast<size_t>(first + r) * size + c);
      });
      put_product(pool, slice, padded(kSlice), rows, size, weight_, first > 0,
                  [&](int r) { return dhidden + static_cast<size_t>(r) * size; });
      if (!dweight) continue;
      transpose(pool, slice, padded(kSlice), rows, wide, turned);
      put_product(pool, turned, padded(rows), count, size, hidden_, add,
                  [&](int r) { return dweight + static_cast<size_t>(first + r) * size; });
    }
  }

 private:
  static constexpr int kSlice = 4096;  // of the vocabulary; a block of so many inputs is a quarter of a level-2 cache

  // bf16[R, padded(kSlice)]: gradients of the logits first .. first + count - 1, zeros behind them.
  static void slopes_of(Pool& pool, const float* logits, int rows, int vocab, int first, int count, float temperature,
                        const int64_t* targets, const float* normalizers, const float* slopes, bf16* out) {
    pool.run(rows, [&](int r, int) {
      const float* row = logits + static_cast<size_t>(r) * vocab;
      const float slope = slopes[r] / temperature;
      const __m512 down = _mm512_set1_ps(-slope), factor = _mm512_set1_ps(1.0f / temperature);
      const __m512 norm = _mm512_set1_ps(normalizers[r]);
      const int64_t target = targets[r] - first;
      bf16* to = out + static_cast<size_t>(r) * padded(kSlice);
      for (int c = 0; c < round_up(count, 2 * kLanes); c += kLanes) {
        const __mmask16 in = lanes_left(count - c);
        const __m512 p = exp512(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(in, row + c), factor, norm));
        __m512 d = _mm512_maskz_mul_ps(in, p, down);
        if (target >= c && target < c + kLanes)
          d = _mm512_mask_add_ps(d, static_cast<__mmask16>(1 << (target - c)), d, _mm512_set1_ps(slope));
        store_bf16(to + c, d);
      }
    });
  }

  Linear weight_, hidden_;
  Buffer<bf16> low_, slice_, turned_;
};

}  // namespace leadout
