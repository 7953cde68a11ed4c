// One decoder layer of the train stage, forward and backward, in one call each.
//
// Products take bfloat16 operands and sum in float32, as under autocast; everything between them stays in float32 and
// is fused into the product before or the packing after: norms, the gate, residuals, casts. Kept from forward to
// backward are the residual stream (twice), the projections' outputs in bfloat16 and a few numbers a token; normed and
// gated activations are computed again while they are packed. Weight gradients are float32 and never rounded.
#pragma once
#include "layers.hpp"
#include "pack_attention.hpp"

namespace leadout {

struct TrainSpec {
  int32_t hidden, heads, kv_heads, dim, inner;
  float eps;
};

// Of one layer, float32 as transformers names them, [outputs, inputs]; absent biases and head norms null. The same
// struct holds where gradients go: those of all weights that there are, or all null.
struct TrainWeights {
  float *query, *key, *value, *output, *gate, *up, *down;
  float *query_bias, *key_bias, *value_bias, *output_bias, *gate_bias, *up_bias, *down_bias;
  float *input_norm, *post_norm, *query_norm, *key_norm;
};

// What forward leaves for backward.
struct Kept {
  float *middle, *input_scale, *middle_scale, *lse;  // f32[T, H], f32[T], f32[T], f32[heads, T]
  bf16 *qkv, *mixed, *gate_up;  // bf16[T, (heads + 2 kv_heads) dim], [T, padded(heads dim)], [T, 2 inner] by blocks
};

class TrainLayer {
 public:
  explicit TrainLayer(const TrainSpec& spec) : spec(spec), attention_(spec.heads, spec.kv_heads, spec.dim, spec.eps) {}

  const TrainSpec spec;

  // x f32[T, H] -> out f32[T, H]
  void forward(Pool& pool, const Pack& pack, const TrainWeights& w, const float* x, const Kept& kept, float* out) {
    const int tokens = pack.tokens, size = spec.hidden, mixed = spec.heads * spec.dim, inner = spec.inner;
    bf16* low = low_.reserve(static_cast<size_t>(tokens) * padded(std::max(size, inner)));
    norm(pool, x, tokens, w.input_norm, kept.input_scale, low);
    pack_columns(pool, weight_, size, attention_.width(), [&](int c) { return projection(w, c, size); });
    multiply(pool, low, padded(size), tokens, weight_, nullptr, [&](int j, int row0, int count, const float* y) {
      each_vector(j, attention_.width(), row0, count, y, [&](int t, int c, __m512 sum) {
        if (const float* bias = projection_bias(w, c)) sum = _mm512_add_ps(sum, _mm512_loadu_ps(bias));
        store_bf16(kept.qkv + static_cast<size_t>(t) * attention_.width() + c, sum);
      });
    });
    attention_.forward(pool, pack, kept.qkv, w.query_norm, w.key_norm, kept.mixed, kept.lse);
    add_product(pool, kept.mixed, padded(mixed), tokens, w.output, w.output_bias, mixed, x, kept.middle);
    norm(pool, kept.middle, tokens, w.post_norm, kept.middle_scale, low);
    pack_columns(pool, weight_, size, 2 * inner, [&](int c) { return gate_up_row(w, c); });
    bf16* active = active_.reserve(static_cast<size_t>(tokens) * padded(inner));
    multiply(pool, low, padded(size), tokens, weight_, nullptr, [&](int j, int row0, int count, const float* y) {
      for (int r = 0; r < count; ++r) {
        __m512 gate = _mm512_load_ps(y + r * kColumns), up = _mm512_load_ps(y + r * kColumns + kLanes);
        if (w.gate_bias) gate = _mm512_add_ps(gate, _mm512_loadu_ps(w.gate_bias + j * kLanes));
        if (w.up_bias) up = _mm512_add_ps(up, _mm512_loadu_ps(w.up_bias + j * kLanes));
        bf16* keep = kept.gate_up + static_cast<size_t>(row0 + r) * 2 * inner + j * kColumns;
        store_bf16(keep, gate), store_bf16(keep + kLanes, up);
        store_bf16(active + static_cast<size_t>(row0 + r) * padded(inner) + j * kLanes,
                   _mm512_mul_ps(silu512(widen(keep)), widen(keep + kLanes)));
      }
    });
    add_product(pool, active, padded(inner), tokens, w.down, w.down_bias, inner, kept.middle, out);
  }

  // dout f32[T, H] -> dx f32[T, H], and gradients of all weights where `g` has a place for them.
  void backward(Pool& pool, const Pack& pack, const TrainWeights& w, const float* x, const Kept& kept,
                const float* dout, float* dx, const TrainWeights& g) {
    const int tokens = pack.tokens, size = spec.hidden, mixed = spec.heads * spec.dim, width = attention_.width();
    const size_t all = static_cast<size_t>(tokens) * size;
    float* middle = middle_.reserve(all);
    mlp_back(pool, tokens, w, kept, dout, middle, g);
    bf16* low = low_rows(pool, middle, tokens, size);
    if (g.output) {
      transpose_of(pool, low, tokens, size);
      pack_rows(pool, weight_, tokens, mixed, [&](int t, int c) { return widen(kept.mixed + static_cast<size_t>(t) * padded(mixed) + c); });
      weight_gradient(pool, tokens, size, mixed, [&](int r) { return g.output + static_cast<size_t>(r) * mixed; });
    }
    bias_gradient(pool, tokens, size, [&](int r) { return g.output_bias ? g.output_bias + r : nullptr; });
    float* wide = wide_.reserve(static_cast<size_t>(tokens) * std::max(size, mixed));
    pack_rows(pool, weight_, size, mixed, [&](int r, int c) { return _mm512_loadu_ps(w.output + static_cast<size_t>(r) * mixed + c); });
    product(pool, low, padded(size), tokens, mixed, wide);
    bf16* dqkv = active_.reserve(static_cast<size_t>(tokens) * padded(width));
    attention_.backward(pool, pack, kept.qkv, w.query_norm, w.key_norm, kept.mixed, kept.lse, wide, dqkv, g.query_norm,
                        g.key_norm);
    if (g.query) {
      transpose_of(pool, dqkv, tokens, width);
      pack_normed(pool, tokens, x, kept.input_scale, w.input_norm);
      weight_gradient(pool, tokens, width, size, [&](int r) { return projection(g, r, size); });
    }
    bias_gradient(pool, tokens, width, [&](int r) { return projection_bias(g, r); });
    pack_rows(pool, weight_, width, size, [&](int r, int c) { return _mm512_loadu_ps(projection(w, r, size) + c); });
    product(pool, dqkv, padded(width), tokens, size, wide);
    norm_back(pool, x, kept.input_scale, w.input_norm, tokens, wide, middle, dx, g.input_norm);
  }

 private:
  // fn(row, column, 16 sums) over a tile of block j.
  template <class Fn>
  static void each_vector(int j, int columns, int row0, int count, const float* y, Fn&& fn) {
    for (int r = 0; r < count; ++r)
      for (int c = j * kColumns; c < std::min(columns, (j + 1) * kColumns); c += kLanes)
        fn(row0 + r, c, _mm512_load_ps(y + r * kColumns + c - j * kColumns));
  }

  // Row r of the stacked query, key and value projection, of weights or of gradients.
  float* projection(const TrainWeights& w, int r, int inputs) const {
    const int queries = spec.heads * spec.dim, keys = spec.kv_heads * spec.dim;
    float* from = r < queries ? w.query : r < queries + keys ? w.key : w.value;
    return from + static_cast<size_t>(r < queries ? r : (r - queries) % keys) * inputs;
  }

  float* projection_bias(const TrainWeights& w, int r) const {
    const int queries = spec.heads * spec.dim, keys = spec.kv_heads * spec.dim;
    float* from = r < queries ? w.query_bias : r < queries + keys ? w.key_bias : w.value_bias;
    return from ? from + (r < queries ? r : (r - queries) % keys) : nullptr;
  }

  // Row r of the gate and up projections, 16 by 16 in turn.
  float* gate_up_row(const TrainWeights& w, int r) const {
    const int source = gate_up_source(r, spec.inner);
    return source < spec.inner ? w.gate + static_cast<size_t>(source) * spec.hidden
                               : w.up + static_cast<size_t>(source - spec.inner) * spec.hidden;
  }

  // out = bf16(x / rms * weight); leaves 1 / rms.
  void norm(Pool& pool, const float* x, int tokens, const float* weight, float* scale, bf16* out) const {
    const int size = spec.hidden;
    each_row_of(pool, tokens, [&](int t, int) {
      const float* row = x + static_cast<size_t>(t) * size;
      __m512 square = _mm512_setzero_ps();
      for (int c = 0; c < size; c += kLanes) square = _mm512_fmadd_ps(_mm512_loadu_ps(row + c), _mm512_loadu_ps(row + c), square);
      scale[t] = 1.0f / std::sqrt(_mm512_reduce_add_ps(square) / static_cast<float>(size) + spec.eps);
      for (int c = 0; c < size; c += kLanes)
        store_bf16(out + static_cast<size_t>(t) * padded(size) + c, normed(row + c, scale[t], weight + c));
    });
  }

  static __m512 normed(const float* x, float scale, const float* weight) {
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(scale)), _mm512_loadu_ps(weight));
  }

  void pack_normed(Pool& pool, int tokens, const float* x, const float* scale, const float* weight) {
    pack_rows(pool, weight_, tokens, spec.hidden, [&](int t, int c) {
      return normed(x + static_cast<size_t>(t) * spec.hidden + c, scale[t], weight + c);
    });
  }

  // out = x + a . weight^T + bias, `weight` f32[H, inputs].
  void add_product(Pool& pool, const bf16* a, size_t stride, int tokens, const float* weight, const float* bias,
                   int inputs, const float* x, float* out) {
    const int size = spec.hidden;
    pack_columns(pool, weight_, inputs, size, [&](int c) { return weight + static_cast<size_t>(c) * inputs; });
    multiply(pool, a, stride, tokens, weight_, nullptr, [&](int j, int row0, int count, const float* y) {
      each_vector(j, size, row0, count, y, [&](int t, int c, __m512 sum) {
        if (bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(bias + c));
        const size_t at = static_cast<size_t>(t) * size + c;
        _mm512_storeu_ps(out + at, _mm512_add_ps(sum, _mm512_loadu_ps(x + at)));
      });
    });
  }

  // out f32[rows, columns] = a . what is packed
  void product(Pool& pool, const bf16* a, size_t stride, int rows, int columns, float* out) {
    put_product(pool, a, stride, rows, columns, weight_, false,
                [&](int r) { return out + static_cast<size_t>(r) * columns; });
  }

  // The MLP's half: dout -> gradient at the middle of the layer.
  void mlp_back(Pool& pool, int tokens, const TrainWeights& w, const Kept& kept, const float* dout, float* dmiddle,
                const TrainWeights& g) {
    const int size = spec.hidden, inner = spec.inner;
    const bf16* low = low_rows(pool, dout, tokens, size);
    if (g.down) {
      transpose_of(pool, low, tokens, size);
      pack_rows(pool, weight_, tokens, inner, [&](int t, int c) {
        const bf16* gate = kept.gate_up + static_cast<size_t>(t) * 2 * inner + 2 * c;
        return _mm512_mul_ps(silu512(widen(gate)), widen(gate + kLanes));
      });
      weight_gradient(pool, tokens, size, inner, [&](int r) { return g.down + static_cast<size_t>(r) * inner; });
    }
    bias_gradient(pool, tokens, size, [&](int r) { return g.down_bias ? g.down_bias + r : nullptr; });
    pack_rows(pool, weight_, size, inner, [&](int r, int c) { return _mm512_loadu_ps(w.down + static_cast<size_t>(r) * inner + c); });
    bf16* dgate_up = active_.reserve(static_cast<size_t>(tokens) * padded(2 * inner));
    multiply(pool, low, padded(size), tokens, weight_, nullptr, [&](int j, int row0, int count, const float* y) {
      each_vector(j, inner, row0, count, y, [&](int t, int c, __m512 d) {
        const bf16* at = kept.gate_up + static_cast<size_t>(t) * 2 * inner + 2 * c;
        const __m512 gate = widen(at), one = _mm512_set1_ps(1.0f);
        const __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
        const __m512 silu = _mm512_mul_ps(gate, sigmoid);
        // silu' = sigmoid (1 + gate (1 - sigmoid)) = sigmoid + silu (1 - sigmoid)
        const __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, sigmoid), sigmoid);
        bf16* to = dgate_up + static_cast<size_t>(t) * padded(2 * inner) + 2 * c;
        store_bf16(to, _mm512_mul_ps(_mm512_mul_ps(d, widen(at + kLanes)), slope));
        store_bf16(to + kLanes, _mm512_mul_ps(d, silu));
      });
    });
    if (g.gate) {
      transpose_of(pool, dgate_up, tokens, 2 * inner);
      pack_normed(pool, tokens, kept.middle, kept.middle_scale, w.post_norm);
      weight_gradient(pool, tokens, 2 * inner, size, [&](int r) { return gate_up_row(g, r); });
    }
    bias_gradient(pool, tokens, 2 * inner, [&](int r) -> float* {
      const int source = gate_up_source(r, inner);
      if (!g.gate_bias) return nullptr;
      return source < inner ? g.gate_bias + source : g.up_bias + source - inner;
    });
    pack_rows(pool, weight_, 2 * inner, size, [&](int r, int c) { return _mm512_loadu_ps(gate_up_row(w, r) + c); });
    float* wide = wide_.reserve(static_cast<size_t>(tokens) * std::max(size, spec.heads * spec.dim));
    product(pool, dgate_up, padded(2 * inner), tokens, size, wide);
    norm_back(pool, kept.middle, kept.middle_scale, w.post_norm, tokens, wide, dout, dmiddle, g.post_norm);
  }

  // bf16 rows with the stride that products like.
  bf16* low_rows(Pool& pool, const float* x, int tokens, int size) {
    bf16* low = low_.reserve(static_cast<size_t>(tokens) * padded(std::max(size, spec.inner)));
    narrow(pool, x, tokens, size, low);
    return low;
  }

  void transpose_of(Pool& pool, const bf16* x, int tokens, int columns) {
    transpose(pool, x, padded(columns), tokens, columns, turned_.reserve(static_cast<size_t>(columns) * padded(tokens)));
  }

  // Row r of (transposed gradient) . (packed activations) goes to place(r), f32[inputs].
  template <class Place>
  void weight_gradient(Pool& pool, int tokens, int outputs, int inputs, Place&& place) {
    put_product(pool, turned_.get(), padded(tokens), outputs, inputs, weight_, false, place);
  }

  // Sums of the transposed gradient's rows, where place(r) is not null.
  template <class Place>
  void bias_gradient(Pool& pool, int tokens, int outputs, Place&& place) {
    if (!place(0)) return;
    pool.run(outputs / kLanes, [&](int piece, int) {
      for (int r = piece * kLanes; r < (piece + 1) * kLanes; ++r) {
        __m512 sum = _mm512_setzero_ps();
        const bf16* row = turned_.get() + static_cast<size_t>(r) * padded(tokens);
        for (int t = 0; t < tokens; t += kLanes) sum = _mm512_add_ps(sum, widen(row + t));
        *place(r) = _mm512_reduce_add_ps(sum);
      }
    });
  }

  // dx = residual + gradient through the norm of dnormed; `dweight` is set where not null.
  void norm_back(Pool& pool, const float* x, const float* scale, const float* weight, int tokens, const float* dnormed,
                 const float* residual, float* dx, float* dweight) {
    const int size = spec.hidden, pieces = row_pieces(tokens);
    float* partial = partial_.reserve(static_cast<size_t>(pieces) * size);
    std::fill_n(partial, static_cast<size_t>(pieces) * size, 0.0f);
    each_row_of(pool, tokens, [&](int t, int piece) {
      const size_t at = static_cast<size_t>(t) * size;
      const __m512 inverse = _mm512_set1_ps(scale[t]);
      __m512 dot = _mm512_setzero_ps();
      for (int c = 0; c < size; c += kLanes) {
        const __m512 d = _mm512_loadu_ps(dnormed + at + c), h = _mm512_mul_ps(_mm512_loadu_ps(x + at + c), inverse);
        float* sum = partial + static_cast<size_t>(piece) * size + c;
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(d, h, _mm512_loadu_ps(sum)));
        dot = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_loadu_ps(weight + c)), h, dot);
      }
      const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dot) / static_cast<float>(size));
      for (int c = 0; c < size; c += kLanes) {
        const __m512 d = _mm512_mul_ps(_mm512_loadu_ps(dnormed + at + c), _mm512_loadu_ps(weight + c));
        const __m512 h = _mm512_mul_ps(_mm512_loadu_ps(x + at + c), inverse);
        _mm512_storeu_ps(dx + at + c, _mm512_fmadd_ps(_mm512_fnmadd_ps(h, mean, d), inverse, _mm512_loadu_ps(residual + at + c)));
      }
    });
    if (!dweight) return;
    std::fill_n(dweight, size, 0.0f);
    for (int piece = 0; piece < pieces; ++piece)
      for (int c = 0; c < size; ++c) dweight[c] += partial[static_cast<size_t>(piece) * size + c];
  }

  PackAttention attention_;
  Linear weight_;  // the operand packed last
  Buffer<bf16> low_, active_, turned_;
  Buffer<float> middle_, wide_, partial_;
};

}  // namespace leadout
