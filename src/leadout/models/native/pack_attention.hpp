// Attention over a flat pack in the train stage, forward and backward: a completion sees its prompt and itself.
//
// Float32 throughout, but for what goes in and out. The keys that a segment sees are two runs of the pack, its prompt's
// and its own, and are laid out for each segment and head as one transposed panel. Work is divided by segment and head
// on the way forward. On the way back a prompt's keys collect from all its completions, so that a family (a prompt and
// its completions) and a head are one piece: sums have a fixed order, whatever the number of threads.
//
// Flash attention's formulas: P = exp(S - lse), dS = P * (dP - rowsum(dO * O)) (Dao et al. 2022, arXiv 2205.14135,
// algorithm 4).
#pragma once
#include <cmath>
#include <deque>

#include "panels.hpp"

namespace leadout {

// Segments of a pack in order; a family is a prompt and the completions after it.
struct Pack {
  int32_t tokens, segments, families, longest;                        // longest: most keys that a segment sees
  const int32_t *start, *length, *prompt_start, *prompt_length;       // [segments]; prompt_length 0 for prompts
  const int32_t* first;                                               // [families + 1], segments
  const float *cosine, *sine;                                         // f32[tokens, dim]; the halves are equal
};

// c[m][n] (+)= sum over k of a[m * a_row + k * a_step] * b[k][n] for M rows and 16 V columns.
template <int M, int V>
inline void small_block(const float* a, size_t a_row, size_t a_step, const float* b, size_t b_row, int depth, float* c,
                        size_t c_row, bool add) {
  __m512 sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[m][v] = add ? _mm512_loadu_ps(c + m * c_row + v * kLanes) : _mm512_setzero_ps();
  for (int k = 0; k < depth; ++k, a += a_step, b += b_row) {
    __m512 w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = _mm512_loadu_ps(b + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512 x = _mm512_set1_ps(a[m * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] = _mm512_fmadd_ps(x, w[v], sum[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + m * c_row + v * kLanes, sum[m][v]);
}

// A product of any number of rows and a multiple of 16 columns.
inline void small_product(int rows, int columns, int depth, const float* a, size_t a_row, size_t a_step, const float* b,
                          size_t b_row, float* c, size_t c_row, bool add) {
  for (int n = 0; n < columns; n += 4 * kLanes)
    for (int m = 0; m < rows; m += 6) {
      const int high = std::min(6, rows - m), wide = std::min(4, (columns - n) / kLanes);
      const float *from = a + m * a_row, *by = b + n;
      float* to = c + m * c_row + n;
      switch (high * 8 + wide) {
#define LEADOUT_BLOCK(M, V) \
  case M * 8 + V: small_block<M, V>(from, a_row, a_step, by, b_row, depth, to, c_row, add); break;
#define LEADOUT_BLOCKS(M) LEADOUT_BLOCK(M, 1) LEADOUT_BLOCK(M, 2) LEADOUT_BLOCK(M, 3) LEADOUT_BLOCK(M, 4)
        LEADOUT_BLOCKS(1) LEADOUT_BLOCKS(2) LEADOUT_BLOCKS(3) LEADOUT_BLOCKS(4) LEADOUT_BLOCKS(5) LEADOUT_BLOCKS(6)
#undef LEADOUT_BLOCKS
#undef LEADOUT_BLOCK
      }
    }
}

class PackAttention {
 public:
  PackAttention(int heads, int kv_heads, int dim, float eps) : heads_(heads), kv_heads_(kv_heads), dim_(dim), eps_(eps) {}

  int width() const { return (heads_ + 2 * kv_heads_) * dim_; }

  // qkv bf16[T, width] -> out bf16[T, padded(heads dim)], lse f32[heads, T]. Norms of query and key heads f32[dim] or null.
  void forward(Pool& pool, const Pack& pack, const bf16* qkv, const float* query_norm, const float* key_norm, bf16* out,
               float* lse) {
    rotate(pool, pack, qkv, query_norm, key_norm);
    const size_t panel = panel_size(pack);
    scratch_.resize(pool.threads());
    pool.run(pack.segments * heads_, [&](int piece, int thread) {
      const int s = piece / heads_, h = piece % heads_;
      Panels p(scratch_[thread], panel, dim_, 1);
      lay_keys(pack, s, head(pack, heads_ + h / fold()), p.keys, p.row);
      each_block(pack, s, [&](int first, int count, int seen) {
        const float* query = head(pack, h) + static_cast<size_t>(first) * dim_;
        small_product(count, round_up(seen, kLanes), dim_, query, dim_, 1, p.keys, p.row, p.scores, p.row, false);
        for (int i = 0; i < count; ++i)
          lse[static_cast<size_t>(h) * pack.tokens + first + i] = softmax(p.scores + i * p.row, seen - count + i + 1, seen);
        weigh(pack, s, h, count, seen, p);
        for (int i = 0; i < count; ++i)
          for (int d = 0; d < dim_; d += kLanes)
            store_bf16(out + static_cast<size_t>(first + i) * padded(heads_ * dim_) + h * dim_ + d,
                       _mm512_loadu_ps(p.mixed + i * dim_ + d));
      });
    });
  }

  // dout f32[T, heads dim] -> dqkv bf16[T, padded(width)]; gradients of the two head norms f32[dim] are set where not null.
  void backward(Pool& pool, const Pack& pack, const bf16* qkv, const float* query_norm, const float* key_norm,
                const bf16* out, const float* lse, const float* dout, bf16* dqkv, float* dquery_norm, float* dkey_norm) {
    rotate(pool, pack, qkv, query_norm, key_norm);
    const size_t panel = panel_size(pack), plane = static_cast<size_t>(pack.tokens) * dim_;
    scratch_.resize(pool.threads());
    float* grads = grads_.reserve(3 * heads_ * plane);  // of rotated queries, keys and values, per query head
    pool.run(pack.families * heads_, [&](int piece, int thread) {
      const int family = piece / heads_, h = piece % heads_;
      float *dq = grads + h * plane, *dk = grads + (heads_ + h) * plane, *dv = grads + (2 * heads_ + h) * plane;
      for (int s = pack.first[family]; s < pack.first[family + 1]; ++s)
        for (float* grad : {dk, dv})
          std::fill_n(grad + static_cast<size_t>(pack.start[s]) * dim_, static_cast<size_t>(pack.length[s]) * dim_, 0.0f);
      Panels p(scratch_[thread], panel, dim_, 2);
      for (int s = pack.first[family]; s < pack.first[family + 1]; ++s) {
        lay_keys(pack, s, head(pack, heads_ + h / fold()), p.keys, p.row);
        lay_keys(pack, s, head(pack, heads_ + kv_heads_ + h / fold()), p.values, p.row);
        each_block(pack, s, [&](int first, int count, int seen) {
          go_back(pack, s, h, first, count, seen, p, out, lse, dout, dq, dk, dv);
        });
      }
    });
    rotate_back(pool, pack, qkv, query_norm, key_norm, dqkv, dquery_norm, dkey_norm);
  }

 private:
  static constexpr int kBlock = 36;  // query tokens whose scores exist at once

  // Of one thread: transposed keys and values, and what belongs to a block of queries.
  struct Panels {
    float *keys, *values, *scores, *slopes, *mixed;
    size_t row;  // elements from row to row of all but `mixed`
    Panels(Buffer<float>& memory, size_t row, int dim, int sides) : row(row) {
      keys = memory.reserve(sides * (dim + kBlock) * row + static_cast<size_t>(kBlock) * dim);
      values = keys + (sides - 1) * dim * row;
      scores = values + dim * row;
      slopes = scores + (sides - 1) * kBlock * row;
      mixed = slopes + kBlock * row;
    }
  };

  int fold() const { return heads_ / kv_heads_; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(dim_)); }
  static size_t panel_size(const Pack& pack) { return round_up(pack.longest, 2 * kLanes) + kLanes; }
  const float* head(const Pack& pack, int index) const {
    return rotated_.get() + static_cast<size_t>(index) * pack.tokens * dim_;
  }

  // fn(first token, number, keys seen by the last of them) for blocks of a segment's tokens.
  template <class Fn>
  static void each_block(const Pack& pack, int s, Fn&& fn) {
    const int length = pack.length[s], blocks = (length + kBlock - 1) / kBlock;
    for (int b = 0; b < blocks; ++b) {
      const int begin = static_cast<int>(static_cast<int64_t>(length) * b / blocks);
      const int end = static_cast<int>(static_cast<int64_t>(length) * (b + 1) / blocks);
      fn(pack.start[s] + begin, end - begin, pack.prompt_length[s] + end);
    }
  }

  // fn(first token, number, column) for the two runs of keys that a segment sees, up to `seen` of them.
  template <class Fn>
  static void each_run(const Pack& pack, int s, int seen, Fn&& fn) {
    const int prompt = std::min(seen, pack.prompt_length[s]);
    if (prompt) fn(pack.prompt_start[s], prompt, 0);
    if (seen > prompt) fn(pack.start[s], seen - prompt, prompt);
  }

  // to[d][column] = from[token][d], zeros behind the last up to a multiple of 16.
  void lay_keys(const Pack& pack, int s, const float* from, float* to, size_t row) const {
    const int all = pack.prompt_length[s] + pack.length[s];
    auto token = [&](int column) {
      return column < pack.prompt_length[s] ? pack.prompt_start[s] + column
                                            : pack.start[s] + column - pack.prompt_length[s];
    };
    for (int column = 0; column < all; column += kLanes)
      for (int d = 0; d < dim_; d += kLanes) {
        __m512i v[16];
        for (int k = 0; k < kLanes; ++k)
          v[k] = column + k < all ? _mm512_loadu_si512(from + static_cast<size_t>(token(column + k)) * dim_ + d)
                                  : _mm512_setzero_si512();
        transpose16(v);
        for (int k = 0; k < kLanes; ++k) _mm512_storeu_si512(to + (d + k) * row + column, v[k]);
      }
  }

  // In place: scores of `valid` keys become probabilities, those up to `seen`, rounded up, 0; returns log sum exp.
  float softmax(float* scores, int valid, int seen) const {
    const __m512 minus = _mm512_set1_ps(-INFINITY);
    __m512 most = minus, total = _mm512_setzero_ps();
    for (int c = 0; c < valid; c += kLanes)
      most = _mm512_max_ps(most, _mm512_mask_loadu_ps(minus, lanes_left(valid - c), scores + c));
    const float top = _mm512_reduce_max_ps(most);
    const __m512 s = _mm512_set1_ps(scale()), shift = _mm512_set1_ps(top);
    for (int c = 0; c < seen; c += kLanes) {
      const __m512 e = exp512(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + c), shift), s));
      const __m512 kept = _mm512_maskz_mov_ps(lanes_left(valid - c), e);
      _mm512_storeu_ps(scores + c, kept);
      total = _mm512_add_ps(total, kept);
    }
    const float sum = _mm512_reduce_add_ps(total);
    const __m512 inverse = _mm512_set1_ps(1.0f / sum);
    for (int c = 0; c < valid; c += kLanes)
      _mm512_storeu_ps(scores + c, _mm512_mul_ps(_mm512_loadu_ps(scores + c), inverse));
    return top * scale() + std::log(sum);
  }

  // mixed = probabilities . values
  void weigh(const Pack& pack, int s, int h, int count, int seen, const Panels& p) const {
    const float* values = head(pack, heads_ + kv_heads_ + h / fold());
    each_run(pack, s, seen, [&](int first, int keys, int column) {
      small_product(count, dim_, keys, p.scores + column, p.row, 1, values + static_cast<size_t>(first) * dim_, dim_,
                    p.mixed, dim_, column > 0);
    });
  }

  void go_back(const Pack& pack, int s, int h, int first, int count, int seen, const Panels& p, const bf16* out,
               const float* lse, const float* dout, float* dq, float* dk, float* dv) const {
    const int all = heads_ * dim_, wide = round_up(seen, kLanes);
    const size_t at = static_cast<size_t>(first) * dim_;
    const float *query = head(pack, h) + at, *keys = head(pack, heads_ + h / fold());
    const float* given = dout + static_cast<size_t>(first) * all + h * dim_;
    small_product(count, wide, dim_, query, dim_, 1, p.keys, p.row, p.scores, p.row, false);
    small_product(count, wide, dim_, given, all, 1, p.values, p.row, p.slopes, p.row, false);
    for (int i = 0; i < count; ++i) {
      __m512 dot = _mm512_setzero_ps();
      const bf16* own = out + static_cast<size_t>(first + i) * padded(all) + h * dim_;
      for (int d = 0; d < dim_; d += kLanes)
        dot = _mm512_fmadd_ps(widen(own + d), _mm512_loadu_ps(given + static_cast<size_t>(i) * all + d), dot);
      const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dot)), factor = _mm512_set1_ps(scale());
      const __m512 norm = _mm512_set1_ps(lse[static_cast<size_t>(h) * pack.tokens + first + i]);
      float *score = p.scores + i * p.row, *slope = p.slopes + i * p.row;
      const int valid = seen - count + i + 1;
      for (int c = 0; c < wide; c += kLanes) {
        const __m512 e = exp512(_mm512_fmsub_ps(_mm512_loadu_ps(score + c), factor, norm));
        const __m512 kept = _mm512_maskz_mov_ps(lanes_left(valid - c), e);
        const __m512 d = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(slope + c), mean), factor);
        _mm512_storeu_ps(score + c, kept);
        _mm512_storeu_ps(slope + c, _mm512_mul_ps(kept, d));
      }
    }
    each_run(pack, s, seen, [&](int start, int number, int column) {
      const size_t to = static_cast<size_t>(start) * dim_;
      small_product(count, dim_, number, p.slopes + column, p.row, 1, keys + to, dim_, dq + at, dim_, column > 0);
      small_product(number, dim_, count, p.slopes + column, 1, p.row, query, dim_, dk + to, dim_, true);
      small_product(number, dim_, count, p.scores + column, 1, p.row, given, all, dv + to, dim_, true);
    });
  }

  // 1 / rms of a head, 1 where heads are not normed.
  float inverse_rms(const bf16* x, const float* norm) const {
    if (!norm) return 1.0f;
    __m512 square = _mm512_setzero_ps();
    for (int d = 0; d < dim_; d += kLanes) square = _mm512_fmadd_ps(widen(x + d), widen(x + d), square);
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(square) / static_cast<float>(dim_) + eps_);
  }

  const float* norm_of(int index, const float* query_norm, const float* key_norm) const {
    return index < heads_ ? query_norm : index < heads_ + kv_heads_ ? key_norm : nullptr;
  }

  // Heads as planes f32[heads + 2 kv_heads, T, dim]: queries and keys normed and rotated, values as they are.
  void rotate(Pool& pool, const Pack& pack, const bf16* qkv, const float* query_norm, const float* key_norm) {
    const int all = heads_ + 2 * kv_heads_, half = dim_ / 2;
    const size_t plane = static_cast<size_t>(pack.tokens) * dim_;
    float* to = rotated_.reserve(all * plane);
    each_row_of(pool, pack.tokens, [&](int t, int) {
      const float *c = pack.cosine + static_cast<size_t>(t) * dim_, *s = pack.sine + static_cast<size_t>(t) * dim_;
      alignas(64) float x[512];
      for (int index = 0; index < all; ++index) {
        const bf16* from = qkv + static_cast<size_t>(t) * width() + index * dim_;
        float* out = to + index * plane + static_cast<size_t>(t) * dim_;
        const float* norm = norm_of(index, query_norm, key_norm);
        const __m512 inverse = _mm512_set1_ps(inverse_rms(from, norm));
        for (int d = 0; d < dim_; d += kLanes) {
          const __m512 scaled = _mm512_mul_ps(widen(from + d), inverse);
          _mm512_store_ps(x + d, norm ? _mm512_mul_ps(scaled, _mm512_loadu_ps(norm + d)) : scaled);
        }
        if (index >= heads_ + kv_heads_) std::copy_n(x, dim_, out);
        else
          for (int d = 0; d < half; ++d) {
            out[d] = x[d] * c[d] - x[d + half] * s[d];
            out[d + half] = x[d + half] * c[d] + x[d] * s[d];
          }
      }
    });
  }

  // The way back: per query head gradients to those of the projections' outputs.
  void rotate_back(Pool& pool, const Pack& pack, const bf16* qkv, const float* query_norm, const float* key_norm,
                   bf16* dqkv, float* dquery_norm, float* dkey_norm) {
    const int half = dim_ / 2, pieces = row_pieces(pack.tokens);
    const size_t plane = static_cast<size_t>(pack.tokens) * dim_;
    float* partial = partial_.reserve(static_cast<size_t>(pieces) * 2 * dim_);
    std::fill_n(partial, static_cast<size_t>(pieces) * 2 * dim_, 0.0f);
    each_row_of(pool, pack.tokens, [&](int t, int piece) {
      const float *c = pack.cosine + static_cast<size_t>(t) * dim_, *s = pack.sine + static_cast<size_t>(t) * dim_;
      alignas(64) float g[512], x[512];
      for (int index = 0; index < heads_ + 2 * kv_heads_; ++index) {
        const bool is_query = index < heads_, is_value = index >= heads_ + kv_heads_;
        const float* from = grads_.get() + static_cast<size_t>(t) * dim_;
        if (is_query) std::copy_n(from + index * plane, dim_, g);
        else {
          const int own = (index - heads_) % kv_heads_;
          from += ((is_value ? 2 : 1) * heads_ + own * fold()) * plane;
          for (int d = 0; d < dim_; d += kLanes) {
            __m512 sum = _mm512_setzero_ps();
            for (int f = 0; f < fold(); ++f) sum = _mm512_add_ps(sum, _mm512_loadu_ps(from + f * plane + d));
            _mm512_store_ps(g + d, sum);
          }
        }
        if (!is_value)
          for (int d = 0; d < half; ++d) {
            const float low = g[d], high = g[d + half];
            g[d] = low * c[d] + high * s[d];
            g[d + half] = high * c[d] - low * s[d];
          }
        if (const float* norm = norm_of(index, query_norm, key_norm)) {
          const bf16* given = qkv + static_cast<size_t>(t) * width() + index * dim_;
          for (int d = 0; d < dim_; d += kLanes) _mm512_store_ps(x + d, widen(given + d));
          norm_back(x, inverse_rms(given, norm), norm, g, partial + (piece * 2 + !is_query) * dim_);
        }
        for (int d = 0; d < dim_; d += kLanes)
          store_bf16(dqkv + static_cast<size_t>(t) * padded(width()) + index * dim_ + d, _mm512_load_ps(g + d));
      }
    });
    for (int side = 0; side < 2; ++side) {
      float* to = side ? dkey_norm : dquery_norm;
      if (!to) continue;
      std::fill_n(to, dim_, 0.0f);
      for (int piece = 0; piece < pieces; ++piece)
        for (int d = 0; d < dim_; ++d) to[d] += partial[(piece * 2 + side) * dim_ + d];
    }
  }

  // In place: gradient of norm(x) * weight to that of x; adds the weight's.
  void norm_back(const float* x, float inverse, const float* weight, float* g, float* dweight) const {
    float dot = 0.0f;
    for (int d = 0; d < dim_; ++d) {
      dweight[d] += g[d] * x[d] * inverse;
      g[d] *= weight[d];
      dot += g[d] * x[d];
    }
    const float mean = dot * inverse * inverse / static_cast<float>(dim_);
    for (int d = 0; d < dim_; ++d) g[d] = inverse * (g[d] - x[d] * mean);
  }

  int heads_, kv_heads_, dim_;
  float eps_;
  Buffer<float> rotated_, grads_, partial_;
  std::deque<Buffer<float>> scratch_;
};

}  // namespace leadout
