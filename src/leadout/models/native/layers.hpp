// What decoder layers are made of: the residual stream, products with their last step fused, cached attention.
//
// The residual stream is float32. A norm costs no pass of its own: the product before it leaves bf16(h * weight) and
// the sums of squares of its columns; the product after it multiplies its sums by 1 / rms, which is the same number
// with one rounding less.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.hpp"
#include "gemm.hpp"

namespace leadout {

// Where the scaled columns of a residual stream go on their way to the next product.
struct Stream {
  Buffer<float> hidden, squares, scale;  // [X, H], [blocks, X], [X]
  Buffer<bf16> scaled;                   // [X, padded(H)], times the weight of the next norm

  void reserve(int rows, int size) {
    hidden.reserve(static_cast<size_t>(rows) * size);
    scaled.reserve(static_cast<size_t>(rows) * padded(size));
    squares.reserve(static_cast<size_t>(rows) * (size / kLanes + 1));
    scale.reserve(rows);
  }

  // Takes 16 x n new columns of a row; adds their squares to `square`.
  void put(int row, int size, int column, __m512 h, const float* weight, __m512& square) {
    _mm512_storeu_ps(hidden.get() + static_cast<size_t>(row) * size + column, h);
    store_bf16(scaled.get() + static_cast<size_t>(row) * padded(size) + column,
               _mm512_mul_ps(h, _mm512_loadu_ps(weight + column)));
    square = _mm512_fmadd_ps(h, h, square);
  }

  // 1 / rms of every row from the squares of `parts` column blocks.
  void finish_scale(int rows, int parts, int size, float eps) {
    for (int r = 0; r < rows; ++r) {
      float total = 0.0f;
      for (int p = 0; p < parts; ++p) total += squares.get()[static_cast<size_t>(p) * rows + r];
      scale.get()[r] = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
    }
  }
};

// residual + product, and what the next norm and product need of it.
inline void multiply_add(Pool& pool, const bf16* x, size_t stride, int rows, const Linear& linear, const Linear* next,
                         Stream& stream, int size, const float* next_norm, float eps) {
  multiply(pool, x, stride, rows, linear, next, [&](int j, int row0, int count, const float* y) {
    for (int r = 0; r < count; ++r) {
      __m512 square = _mm512_setzero_ps();
      for (int c = j * kColumns; c < std::min(size, (j + 1) * kColumns); c += kLanes) {
        const float* old = stream.hidden.get() + static_cast<size_t>(row0 + r) * size + c;
        const __m512 sum = _mm512_add_ps(_mm512_load_ps(y + r * kColumns + c - j * kColumns),
                                         _mm512_loadu_ps(linear.bias.get() + c));
        stream.put(row0 + r, size, c, _mm512_add_ps(sum, _mm512_loadu_ps(old)), next_norm, square);
      }
      stream.squares.get()[static_cast<size_t>(j) * rows + row0 + r] = _mm512_reduce_add_ps(square);
    }
  });
  stream.finish_scale(rows, linear.blocks, size, eps);
}

// y * scale + bias in float32.
inline void multiply_scaled(Pool& pool, const bf16* x, size_t stride, int rows, const Linear& linear,
                            const Linear* next, const float* scale, float* out, int columns, size_t out_stride) {
  multiply(pool, x, stride, rows, linear, next, [&](int j, int row0, int count, const float* y) {
    for (int r = 0; r < count; ++r) {
      const __m512 s = _mm512_set1_ps(scale ? scale[row0 + r] : 1.0f);
      for (int c = j * kColumns; c < std::min(columns, (j + 1) * kColumns); c += kLanes) {
        const __m512 sum = _mm512_load_ps(y + r * kColumns + c - j * kColumns);
        const __mmask16 in = columns - c >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (columns - c)) - 1);
        _mm512_mask_storeu_ps(out + (row0 + r) * out_stride + c, in,
                              _mm512_fmadd_ps(sum, s, _mm512_loadu_ps(linear.bias.get() + c)));
      }
    }
  });
}

// silu(gate) * up: a block holds 16 gate columns and their 16 up columns.
inline void multiply_gated(Pool& pool, const bf16* x, size_t stride, int rows, const Linear& linear,
                           const Linear* next, const float* scale, bf16* out, int inner) {
  multiply(pool, x, stride, rows, linear, next, [&](int j, int row0, int count, const float* y) {
    const __m512 gate_bias = _mm512_loadu_ps(linear.bias.get() + j * kColumns);
    const __m512 up_bias = _mm512_loadu_ps(linear.bias.get() + j * kColumns + kLanes);
    for (int r = 0; r < count; ++r) {
      const __m512 s = _mm512_set1_ps(scale[row0 + r]);
      const __m512 gate = _mm512_fmadd_ps(_mm512_load_ps(y + r * kColumns), s, gate_bias);
      const __m512 up = _mm512_fmadd_ps(_mm512_load_ps(y + r * kColumns + kLanes), s, up_bias);
      store_bf16(out + static_cast<size_t>(row0 + r) * padded(inner) + j * kLanes, _mm512_mul_ps(silu512(gate), up));
    }
  });
}

// Column c of a packed gate-up product is row source(c) of [gate; up].
inline int gate_up_source(int column, int inner) {
  const int block = column / kColumns, inside = column % kColumns;
  return inside < kLanes ? block * kLanes + inside : inner + block * kLanes + inside - kLanes;
}

// Keys and values of tokens into a cache, and attention over it.
class CachedAttention {
 public:
  CachedAttention(int heads, int kv_heads, int dim, float eps)
      : heads_(heads), kv_heads_(kv_heads), dim_(dim), eps_(eps), attend_(attend_for(dim)) {}

  // Everything about one call; rows of `qkv` f32[X, (heads + 2 kv_heads) D] belong to token `position` of `row`.
  struct Call {
    const float* qkv;
    const float *cosine, *sine;            // f32[P, D/2]
    const float *query_norm, *key_norm;    // f32[D] or null
    const int *first, *count, *position;   // per row: its first token in qkv, how many, the position of the first
    const int64_t* rows;
    int batch, most, longest;              // rows, largest count, largest position + count
    bool newest;                           // only the last token of each row asks
    bf16* cache;
    int64_t row_stride, head_stride;
    bf16* out;                             // [X, padded(heads * D)]
  };

  void run(Pool& pool, const Call& c) {
    constexpr int kOnePhase = 16;  // wider blocks are split, so that a lone prompt keeps every thread busy
    const int tile = std::max(1, kOnePhase / 2);
    scratch_.resize(std::max<size_t>(scratch_.size(), pool.threads()));
    if (c.most <= kOnePhase) {
      pool.run(c.batch * kv_heads_, [&](int piece, int thread) {
        const int b = piece / kv_heads_, k = piece % kv_heads_;
        write(c, b, k);
        read(c, b, k, c.newest ? std::max(c.count[b] - 1, 0) : 0, c.count[b], thread, ahead(c, piece + 1));
      });
      return;
    }
    pool.run(c.batch * kv_heads_, [&](int piece, int) { write(c, piece / kv_heads_, piece % kv_heads_); });
    if (c.newest) {
      pool.run(c.batch * kv_heads_, [&](int piece, int thread) {
        const int b = piece / kv_heads_;
        read(c, b, piece % kv_heads_, std::max(c.count[b] - 1, 0), c.count[b], thread);
      });
      return;
    }
    const int tiles = (c.most + tile - 1) / tile;
    pool.run(c.batch * kv_heads_ * tiles, [&](int piece, int thread) {
      const int b = piece / tiles / kv_heads_, k = piece / tiles % kv_heads_, t = piece % tiles;
      read(c, b, k, std::min(t * tile, c.count[b]), std::min((t + 1) * tile, c.count[b]), thread);
    });
  }

 private:
  struct Scratch {
    std::vector<bf16> queries;
    std::vector<float> scores, head;
    std::vector<int> lengths;
    std::vector<bf16*> out;
  };

  int size() const { return (heads_ + 2 * kv_heads_) * dim_; }

  bf16* head_of(const Call& c, int b, int index) const {
    return c.cache + c.rows[b] * c.row_stride + index * c.head_stride;
  }

  void write(const Call& c, int b, int k) const {
    float head[512];
    for (int n = 0; n < c.count[b]; ++n) {
      const int at = c.position[b] + n;
      const float* token = c.qkv + static_cast<size_t>(c.first[b] + n) * size();
      std::copy_n(token + (heads_ + k) * dim_, dim_, head);
      if (c.key_norm) norm_head(head, c.key_norm, dim_, eps_);
      rotate(head, c.cosine + static_cast<size_t>(at) * (dim_ / 2), c.sine + static_cast<size_t>(at) * (dim_ / 2), dim_ / 2);
      bf16* key = head_of(c, b, k) + static_cast<size_t>(at) * dim_;
      bf16* value = head_of(c, b, kv_heads_ + k) + static_cast<size_t>(at) * dim_;
      for (int d = 0; d < dim_; d += kLanes) {
        store_bf16(key + d, _mm512_loadu_ps(head + d));
        store_bf16(value + d, _mm512_loadu_ps(token + (heads_ + kv_heads_ + k) * dim_ + d));
      }
    }
  }

  // The keys and values of a piece of several rows: they lie apart from those of the piece before, so that every piece
  // would begin with waiting for memory. Long ones are left to the processor's own prefetching, but for their beginning.
  Ahead ahead(const Call& c, int piece) const {
    constexpr size_t kWhole = 40 << 10, kBeginning = 8 << 10;
    if (c.batch == 1 || piece >= c.batch * kv_heads_) return {};
    const int b = piece / kv_heads_, k = piece % kv_heads_;
    const size_t all = static_cast<size_t>(c.position[b] + c.count[b]) * dim_ * sizeof(bf16);
    const size_t bytes = all <= kWhole ? all : kBeginning;
    const char* keys = reinterpret_cast<const char*>(head_of(c, b, k));
    const char* values = reinterpret_cast<const char*>(head_of(c, b, kv_heads_ + k));
    return {keys, keys + bytes, values, values + bytes};
  }

  // Tokens begin..end-1 of row b, the query heads of key-value head k.
  void read(const Call& c, int b, int k, int begin, int end, int thread, Ahead next = {}) {
    if (begin >= end) return;
    const int group = heads_ / kv_heads_, count = (end - begin) * group;
    Scratch& s = scratch_[thread];
    s.queries.resize(std::max<size_t>(s.queries.size(), static_cast<size_t>(count) * dim_));
    s.scores.resize(std::max<size_t>(s.scores.size(), static_cast<size_t>(8) * (c.longest + kLanes)));
    s.lengths.resize(std::max<size_t>(s.lengths.size(), count));
    s.out.resize(std::max<size_t>(s.out.size(), count));
    float head[512];
    for (int n = begin, i = 0; n < end; ++n)
      for (int g = 0; g < group; ++g, ++i) {
        const int at = c.position[b] + n, h = k * group + g;
        std::copy_n(c.qkv + static_cast<size_t>(c.first[b] + n) * size() + h * dim_, dim_, head);
        if (c.query_norm) norm_head(head, c.query_norm, dim_, eps_);
        rotate(head, c.cosine + static_cast<size_t>(at) * (dim_ / 2), c.sine + static_cast<size_t>(at) * (dim_ / 2), dim_ / 2);
        for (int d = 0; d < dim_; d += kLanes)
          store_bf16(s.queries.data() + static_cast<size_t>(i) * dim_ + d, _mm512_loadu_ps(head + d));
        s.lengths[i] = at + 1;
        s.out[i] = c.out + static_cast<size_t>(c.first[b] + n) * padded(heads_ * dim_) + h * dim_;
      }
    attend_(s.queries.data(), s.lengths.data(), s.out.data(), count, head_of(c, b, k), head_of(c, b, kv_heads_ + k),
            1.0f / std::sqrt(static_cast<float>(dim_)), s.scores.data(), next);
  }

  int heads_, kv_heads_, dim_;
  float eps_;
  Attend attend_;
  std::vector<Scratch> scratch_;
};

}  // namespace leadout
