// Attention over the key-value cache where it lies: grouped queries, a length for every query, no mask tensors.
//
// A cache layer is [row, 2K, position, D] in bfloat16: keys of K heads, then values. One call serves the queries of one
// row and key-value head. Sums, softmax and weights are float32; only queries, keys and values are bfloat16.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>

#include "vectors.hpp"

namespace leadout {

// Sums of 16 vectors, as one vector in their order.
inline __m512 sums16(__m512* v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

// Rotates the halves of a head by the angles of a position: cosine and sine, D/2 each.
inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// Root-mean-square norm of one head in place (Qwen3).
inline void norm_head(float* x, const float* weight, int dim, float eps) {
  __m512 square = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + d);
    square = _mm512_fmadd_ps(v, v, square);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(square) / static_cast<float>(dim) + eps));
  for (int d = 0; d < dim; d += kLanes)
    _mm512_storeu_ps(x + d, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + d), scale), _mm512_loadu_ps(weight + d)));
}

// Memory to have in the cache soon, fetched a few lines at a time beside other work: two ranges after one another.
struct Ahead {
  const char *at = nullptr, *end = nullptr, *then = nullptr, *then_end = nullptr;

  void fetch(int lines) {
    for (; lines > 0; --lines, at += 64) {
      if (at >= end) {
        at = then, end = then_end, then = then_end = nullptr;
        if (at >= end) return;
      }
      _mm_prefetch(at, _MM_HINT_T1);
    }
  }
};

// scores[j] = query . keys[j] for j < length, written up to the next multiple of 16 (keys there must be readable).
template <int Vectors>
inline void dot_keys(const bf16* query, const bf16* keys, int length, float* scores, Ahead& ahead, int lines) {
  constexpr int kDim = Vectors * kLanes, kWhole = Vectors / 2;
  __m512i q[kWhole + 1];
#pragma GCC unroll 16
  for (int i = 0; i < kWhole; ++i) q[i] = _mm512_loadu_si512(query + 32 * i);
  constexpr __mmask32 kHalf = 0xffff;
  if (Vectors % 2) q[kWhole] = _mm512_maskz_loadu_epi16(kHalf, query + 32 * kWhole);
  for (int j = 0; j < length; j += kLanes) {
    __m512 sum[kLanes];
    ahead.fetch(lines);
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; ++k) {
      // The last keys are repeated past the end, so that nothing outside the row is read.
      const bf16* key = keys + static_cast<size_t>(j + k < length ? j + k : length - 1) * kDim;
      sum[k] = _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int i = 0; i < kWhole; ++i) sum[k] = dot_pairs(sum[k], q[i], _mm512_loadu_si512(key + 32 * i));
      if (Vectors % 2) sum[k] = dot_pairs(sum[k], q[kWhole], _mm512_maskz_loadu_epi16(kHalf, key + 32 * kWhole));
    }
    _mm512_storeu_ps(scores + j, sums16(sum));
  }
}

// Turns scores into exp(scale * (score - largest)), 0 from `length` to `width`; the reciprocal of their sum.
inline float soften(float* scores, int length, int width, float scale) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 most = lowest;
  for (int j = 0; j < length; j += kLanes) {
    const __mmask16 in = length - j >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (length - j)) - 1);
    most = _mm512_max_ps(most, _mm512_mask_loadu_ps(lowest, in, scores + j));
  }
  const __m512 factor = _mm512_set1_ps(scale), largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  __m512 total = _mm512_setzero_ps();
  for (int j = 0; j < width; j += kLanes) {
    const int left = length - j;
    const __mmask16 in = left >= kLanes ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1 << left) - 1);
    const __m512 y = _mm512_mul_ps(factor, _mm512_sub_ps(_mm512_maskz_loadu_ps(in, scores + j), largest));
    const __m512 e = _mm512_maskz_mov_ps(in, exp512(y));
    total = _mm512_add_ps(total, e);
    _mm512_storeu_ps(scores + j, e);
  }
  return 1.0f / _mm512_reduce_add_ps(total);
}

// out[q] = sum_j scores[q][j] values[j] * inverse[q] for Queries queries.
template <int Vectors, int Queries>
inline void mix_values(const float* scores, int width, const float* inverse, const bf16* values, int length,
                       bf16* const* out, Ahead& ahead, int lines) {
  constexpr int kDim = Vectors * kLanes;
  __m512 sum[Queries][Vectors];
#pragma GCC unroll 8
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sum[q][v] = _mm512_setzero_ps();
  for (int j = 0; j < length; ++j) {
    ahead.fetch(lines);
    __m512 p[Queries];
#pragma GCC unroll 8
    for (int q = 0; q < Queries; ++q) p[q] = _mm512_set1_ps(scores[static_cast<size_t>(q) * width + j]);
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      const __m512 value = widen(values + static_cast<size_t>(j) * kDim + v * kLanes);
#pragma GCC unroll 8
      for (int q = 0; q < Queries; ++q) sum[q][v] = _mm512_fmadd_ps(p[q], value, sum[q][v]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v)
      store_bf16(out[q] + v * kLanes, _mm512_mul_ps(sum[q][v], _mm512_set1_ps(inverse[q])));
}

// Queries of one row and key-value head: query i, bf16[D], sees the first lengths[i] positions and writes to out[i].
// `scores` holds count * (longest length rounded up to 16) floats. `ahead` is fetched meanwhile, as much of it as this
// call reads itself: half beside the keys, half beside the values.
template <int Vectors>
void attend(const bf16* queries, const int* lengths, bf16* const* out, int count, const bf16* keys, const bf16* values,
            float scale, float* scores, Ahead ahead) {
  constexpr int kDim = Vectors * kLanes;
  constexpr int kTogether = Vectors <= 2 ? 6 : Vectors <= 4 ? 4 : Vectors <= 8 ? 2 : 1;
  int longest = 0;
  for (int i = 0; i < count; ++i) longest = lengths[i] > longest ? lengths[i] : longest;
  const int width = (longest + kLanes - 1) / kLanes * kLanes;
  float inverse[kTogether];
  const int passes = (count + kTogether - 1) / kTogether;
  const int with_keys = (kLanes * Vectors / 2 + count - 1) / count, with_values = (Vectors / 2 + passes - 1) / passes;
  for (int i = 0; i < count; i += kTogether) {
    const int here = count - i < kTogether ? count - i : kTogether;
    for (int q = 0; q < here; ++q) {
      float* row = scores + static_cast<size_t>(q) * width;
      dot_keys<Vectors>(queries + static_cast<size_t>(i + q) * kDim, keys, lengths[i + q], row, ahead, with_keys);
      inverse[q] = soften(row, lengths[i + q], width, scale);
    }
    auto mix = [&](auto queries_of) {
      constexpr int kQueries = decltype(queries_of)::value < kTogether ? decltype(queries_of)::value : kTogether;
      mix_values<Vectors, kQueries>(scores, width, inverse, values, longest, out + i, ahead, with_values);
    };
    switch (here) {
      case 1: mix(std::integral_constant<int, 1>()); break;
      case 2: mix(std::integral_constant<int, 2>()); break;
      case 3: mix(std::integral_constant<int, 3>()); break;
      case 4: mix(std::integral_constant<int, 4>()); break;
      case 5: mix(std::integral_constant<int, 5>()); break;
      default: mix(std::integral_constant<int, kTogether>());
    }
  }
}

using Attend = void (*)(const bf16*, const int*, bf16* const*, int, const bf16*, const bf16*, float, float*, Ahead);

// The kernel of a head dimension; null where there is none.
inline Attend attend_for(int dim) {
  switch (dim) {
    case 16: return attend<1>;
    case 32: return attend<2>;
    case 48: return attend<3>;
    case 64: return attend<4>;
    case 80: return attend<5>;
    case 96: return attend<6>;
    case 112: return attend<7>;
    case 128: return attend<8>;
    case 256: return attend<16>;
    default: return nullptr;
  }
}

}  // namespace leadout
