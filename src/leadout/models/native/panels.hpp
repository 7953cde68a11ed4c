// Operands of the train stage's products: weights and activations cut into the blocks that gemm.hpp multiplies by.
//
// A layer's forward pass multiplies by the weights, its backward pass by their transpose and by the activations. Each is
// packed from float32 (or anything that can be loaded as float32) right before its product and used once, since the
// next update changes the weights; packing moves a hundredth of what the product reads from the cache.
#pragma once
#include "gemm.hpp"

namespace leadout {

// 16 x 16 elements of 32 bits.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {  // r[4 g + c], 128-bit lane l: column 4 l + c of rows 4 g .. 4 g + 3
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
    r[4 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
    r[12 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
  }
}

inline __mmask16 lanes_left(int count) {
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1 << std::max(count, 0)) - 1);
}

// Two vectors of 16 floats as 16 pairs (even, odd) of bfloat16.
inline __m512i pairs_of(__m512 even, __m512 odd) {
  const __m256bh e = _mm512_cvtneps_pbh(even), o = _mm512_cvtneps_pbh(odd);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(reinterpret_cast<const __m256i&>(e)),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<const __m256i&>(o)), 16));
}

// For x . W^T: packed column c is row(c), f32[inputs]. `inputs` and `columns` are multiples of 16.
template <class Row>
void pack_columns(Pool& pool, Linear& to, int inputs, int columns, Row&& row) {
  to.inputs = inputs;
  to.blocks = (columns + kColumns - 1) / kColumns;
  bf16* out = to.packed.reserve(to.block_size() * to.blocks);
  pool.run(2 * to.blocks, [&](int piece, int) {
    const int first = piece * kLanes;  // a block holds two runs of 16 columns
    const float* from[kLanes];
    for (int c = 0; c < kLanes; ++c) from[c] = first < columns ? row(first + c) : nullptr;
    __m512i* block = reinterpret_cast<__m512i*>(out + to.block_size() * (piece / 2));
    for (int k = 0; k < inputs; k += 2 * kLanes) {
      const __mmask16 second = lanes_left(inputs - k - kLanes);
      __m512i v[16];
      for (int c = 0; c < kLanes; ++c) {
        if (!from[c]) {
          v[c] = _mm512_setzero_si512();
          continue;
        }
        const __m512bh both =
            _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(second, from[c] + k + kLanes), _mm512_loadu_ps(from[c] + k));
        v[c] = reinterpret_cast<const __m512i&>(both);
      }
      transpose16(v);
      for (int p = 0; p < std::min(kLanes, (inputs - k) / 2); ++p)
        _mm512_store_si512(block + (k / 2 + p) * 2 + piece % 2, v[p]);
    }
  });
}

// For x . M: load(r, c) gives M[r, c .. c + 15]. An odd number of rows gets one of zeros; `columns` is a multiple of 16.
template <class Load>
void pack_rows(Pool& pool, Linear& to, int rows, int columns, Load&& load) {
  constexpr int kTogether = 32;
  to.inputs = round_up(rows, 2);
  to.blocks = (columns + kColumns - 1) / kColumns;
  bf16* out = to.packed.reserve(to.block_size() * to.blocks);
  pool.run((to.inputs + kTogether - 1) / kTogether, [&](int piece, int) {
    for (int r = piece * kTogether; r < std::min(to.inputs, (piece + 1) * kTogether); r += 2)
      for (int c = 0; c < to.blocks * kColumns; c += kLanes) {
        const bool in = c < columns;
        const __m512 zero = _mm512_setzero_ps();
        const __m512i pairs = pairs_of(in ? load(r, c) : zero, in && r + 1 < rows ? load(r + 1, c) : zero);
        _mm512_store_si512(out + to.block_size() * (c / kColumns) + static_cast<size_t>(r) * kColumns + c % kColumns * 2,
                           pairs);
      }
  });
}

// [rows, columns] with `stride` -> [columns, padded(rows)], zeros behind the rows up to a multiple of 32.
inline void transpose(Pool& pool, const bf16* from, size_t stride, int rows, int columns, bf16* to) {
  pool.run(columns / kLanes, [&](int piece, int) {
    const int c = piece * kLanes;
    auto row = [&](int r) {
      if (r >= rows) return _mm512_setzero_si512();
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + r * stride + c)));
    };
    for (int r = 0; r < rows; r += 2 * kLanes) {
      __m512i v[16];
      for (int p = 0; p < kLanes; ++p)
        v[p] = _mm512_or_si512(row(r + 2 * p), _mm512_slli_epi32(row(r + 2 * p + 1), 16));
      transpose16(v);
      for (int k = 0; k < kLanes; ++k)
        _mm512_storeu_si512(to + static_cast<size_t>(c + k) * padded(rows) + r, v[k]);
    }
  });
}

constexpr int kRowsTogether = 16;
inline int row_pieces(int rows) { return (rows + kRowsTogether - 1) / kRowsTogether; }

// fn(row, piece) in pieces of 16 rows, whatever the number of threads.
template <class Fn>
inline void each_row_of(Pool& pool, int rows, Fn&& fn) {
  pool.run(row_pieces(rows), [&](int piece, int) {
    for (int r = piece * kRowsTogether; r < std::min(rows, (piece + 1) * kRowsTogether); ++r) fn(r, piece);
  });
}

// out[r][0 .. columns - 1] = bf16(x[r]), rows padded(columns) apart.
inline void narrow(Pool& pool, const float* x, int rows, int columns, bf16* out) {
  each_row_of(pool, rows, [&](int r, int) {
    for (int c = 0; c < columns; c += kLanes)
      store_bf16(out + static_cast<size_t>(r) * padded(columns) + c,
                 _mm512_loadu_ps(x + static_cast<size_t>(r) * columns + c));
  });
}

// Row r of x . what is packed goes to place(r), f32[columns]; added to what is there where `add`.
template <class Place>
void put_product(Pool& pool, const bf16* x, size_t stride, int rows, int columns, const Linear& packed, bool add,
                 Place&& place) {
  multiply(pool, x, stride, rows, packed, nullptr, [&](int j, int row0, int count, const float* y) {
    for (int r = 0; r < count; ++r) {
      float* to = place(row0 + r);
      for (int c = j * kColumns; c < std::min(columns, (j + 1) * kColumns); c += kLanes) {
        const __m512 sum = _mm512_load_ps(y + r * kColumns + c - j * kColumns);
        _mm512_storeu_ps(to + c, add ? _mm512_add_ps(sum, _mm512_loadu_ps(to + c)) : sum);
      }
    }
  });
}

}  // namespace leadout
