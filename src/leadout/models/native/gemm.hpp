// Matrix products of a few rows with packed bfloat16 weights, float32 sums, and a caller's own last step.
//
// Weights lie in blocks of 32 output columns; inside a block two inputs after one another for 32 columns (the pairs
// that vdpbf16ps multiplies), then the next two inputs. A block is read once from memory, in order, and stays in the
// level-2 cache while all rows pass over it in tiles of up to 13: 26 sums fill the registers, and each loaded weight
// is used 13 times. Every tile fetches its share of the next block ahead, so that memory works during arithmetic.
#pragma once
#include <algorithm>
#include <vector>

#include "pool.hpp"
#include "vectors.hpp"

namespace leadout {

constexpr int kColumns = 32;
constexpr int kTileRows = 13;
constexpr int kStreamRows = 5;
constexpr int kGroupRows = 20 * kTileRows;  // rows that share a pass over a block: their input stays in cache

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Row stride of inputs: not a multiple of 4 KB, which would map the rows of a tile to few cache sets.
inline int padded(int inputs) { return round_up(inputs, 32) + 32; }

struct Linear {
  Buffer<bf16> packed;
  Buffer<float> bias;
  int inputs = 0, blocks = 0;
  bool has_bias = false;

  size_t block_size() const { return static_cast<size_t>(inputs) * kColumns; }
  const bf16* block(int j) const { return packed.get() + block_size() * j; }

  // source(c) is the row of `weight` (bf16[O, inputs], bias f32[O] or null) in packed column c; -1 leaves zeros.
  template <class Source>
  void pack(Pool& pool, const bf16* weight, const float* bias_O, int inputs_, int columns, Source&& source) {
    inputs = inputs_;
    blocks = (columns + kColumns - 1) / kColumns;
    has_bias = bias_O != nullptr;
    bf16* out = packed.reserve(block_size() * blocks);
    float* out_bias = bias.reserve(static_cast<size_t>(blocks) * kColumns);
    const int pairs = inputs / 2;
    pool.run(blocks, [&](int j, int) {
      uint32_t* to = reinterpret_cast<uint32_t*>(out + block_size() * j);
      for (int c = 0; c < kColumns; ++c) {
        const int column = j * kColumns + c, row = column < columns ? source(column) : -1;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(weight + static_cast<size_t>(std::max(row, 0)) * inputs);
        for (int p = 0; p < pairs; ++p) to[static_cast<size_t>(p) * kColumns + c] = row < 0 ? 0 : from[p];
        out_bias[column] = row < 0 || !bias_O ? 0.0f : bias_O[row];
      }
    });
  }
};

// out[r][0..31] = a[r] . block for Rows rows; fetches `lines` cache lines from `ahead` meanwhile, `step` per turn.
template <int Rows>
inline void tile(const bf16* a_, size_t stride, const bf16* block, int pairs, const char* ahead, int step, float* out) {
  constexpr int kParts = Rows == 1 ? 4 : Rows <= 3 ? 2 : 1;  // few rows need more chains of sums to hide the latency
  __m512 sum[kParts][Rows][2];
#pragma GCC unroll 4
  for (int u = 0; u < kParts; ++u)
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[u][r][0] = sum[u][r][1] = _mm512_setzero_ps();
  const size_t ld = stride / 2;
  const uint32_t* a = reinterpret_cast<const uint32_t*>(a_);
  const uint32_t *a4 = a + 4 * ld, *a8 = a + 8 * ld, *a12 = a + 12 * ld;
  const size_t ld3 = 3 * ld;
  const bf16* w = block;
  auto row = [&](int r, int p) {
    const uint32_t* base = r < 4 ? a : r < 8 ? a4 : r < 12 ? a8 : a12;
    const int q = r & 3;
    return base[(q == 3 ? ld3 : q * ld) + p];
  };
  auto turn = [&](int p, int u) {
    __m512i w0 = _mm512_load_si512(w + p * 64), w1 = _mm512_load_si512(w + p * 64 + 32);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      __m512i x = _mm512_set1_epi32(static_cast<int>(row(r, p)));
      sum[u][r][0] = dot_pairs(sum[u][r][0], x, w0);
      sum[u][r][1] = dot_pairs(sum[u][r][1], x, w1);
    }
  };
  int done = 0;
  for (; done + 4 <= pairs; done += 4) {
    for (int k = 0; k < step; ++k, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) turn(p, p % kParts);
    w += 4 * 64, a += 4, a4 += 4, a8 += 4, a12 += 4;
  }
  for (; done < pairs; ++done) {
    turn(0, 0);
    w += 64, ++a, ++a4, ++a8, ++a12;
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      __m512 s = sum[0][r][h];
#pragma GCC unroll 4
      for (int u = 1; u < kParts; ++u) s = _mm512_add_ps(s, sum[u][r][h]);
      _mm512_store_ps(out + r * kColumns + h * kLanes, s);
    }
}

inline void tile_of(int rows, const bf16* a, size_t stride, const bf16* block, int pairs, const char* ahead, int step,
                    float* out) {
  switch (rows) {
#define LEADOUT_TILE(N) \
  case N: return tile<N>(a, stride, block, pairs, ahead, step, out);
    LEADOUT_TILE(1) LEADOUT_TILE(2) LEADOUT_TILE(3) LEADOUT_TILE(4) LEADOUT_TILE(5) LEADOUT_TILE(6) LEADOUT_TILE(7)
    LEADOUT_TILE(8) LEADOUT_TILE(9) LEADOUT_TILE(10) LEADOUT_TILE(11) LEADOUT_TILE(12) LEADOUT_TILE(13)
#undef LEADOUT_TILE
  }
}

// finish(j, row0, rows, y) gets y[rows][32] = x[row0 + r] . weights of block j, without bias. `next` is the product
// that follows, whose first block each thread fetches ahead; null for none.
template <class Finish>
void multiply(Pool& pool, const bf16* x, size_t stride, int rows, const Linear& linear, const Linear* next,
              Finish&& finish) {
  const int groups = (rows + kGroupRows - 1) / kGroupRows, pairs = linear.inputs / 2;
  const size_t bytes = linear.block_size() * sizeof(bf16);
  pool.run(groups * linear.blocks, [&](int piece, int thread) {
    const int group = piece / linear.blocks, j = piece % linear.blocks;
    const int begin = static_cast<int>(static_cast<int64_t>(rows) * group / groups);
    const int end = static_cast<int>(static_cast<int64_t>(rows) * (group + 1) / groups);
    const int tiles = (end - begin + kTileRows - 1) / kTileRows;
    const char* ahead = reinterpret_cast<const char*>(linear.block(j + 1));
    if (j + 1 == linear.blocks || piece + 1 == pool.first_piece(groups * linear.blocks, thread + 1))
      ahead = next ? reinterpret_cast<const char*>(next->block(pool.first_piece(next->blocks, thread))) : nullptr;
    // With few rows the product only waits for memory, and the processor's own prefetching streams best alone.
    const bool streams = end - begin <= kStreamRows && ahead == reinterpret_cast<const char*>(linear.block(j + 1));
    const int step = ahead && !streams ? (8 + tiles - 1) / tiles : 0;
    const size_t share = static_cast<size_t>(step) * 64 * (pairs / 4);
    alignas(64) float y[kTileRows * kColumns];
    for (int t = 0; t < tiles; ++t) {
      const int row0 = begin + (end - begin) * t / tiles, count = begin + (end - begin) * (t + 1) / tiles - row0;
      const bool wanted = step && share * t < bytes;
      tile_of(count, x + row0 * stride, stride, linear.block(j), pairs, wanted ? ahead + share * t : nullptr,
              wanted ? step : 0, y);
      finish(j, row0, count, y);
    }
  });
}

}  // namespace leadout
