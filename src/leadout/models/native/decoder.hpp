// The whole decoder as one call: embedding, layers, final norm. A layer is five phases: query-key-value, attention,
// output, gate-up, down.
#pragma once
#include <stdexcept>

#include "layers.hpp"

namespace leadout {

struct Spec {
  int32_t hidden, layers, heads, kv_heads, dim, inner, vocab, qk_norm;
  float eps;
};

struct Layer {
  Linear qkv, output, gate_up, down;
  Buffer<float> input_norm, post_norm, query_norm, key_norm;
};

// A block of tokens: B rows of N columns, of which counts[b] are real, following lengths[b] cached ones.
struct Block {
  const int64_t *tokens, *counts, *lengths, *rows;  // i64[B, N], i64[B], i64[B], i64[B] physical cache rows
  int32_t batch, width;
  bf16* const* caches;  // one per layer
  int64_t row_stride, head_stride;  // in elements
  int32_t newest;                   // only the state of each row's last token is wanted
};

class Decoder {
 public:
  explicit Decoder(const Spec& spec)
      : spec(spec), layers(spec.layers), attention_(spec.heads, spec.kv_heads, spec.dim, spec.eps) {
    if (!attend_for(spec.dim) || spec.hidden % kLanes || spec.inner % kLanes) throw std::invalid_argument("shape");
  }

  const Spec spec;
  std::vector<Layer> layers;
  Linear head;
  Buffer<float> final_norm, cosine, sine;
  const bf16* embedding = nullptr;  // the caller keeps it

  // taps: layer indices; tapped bf16[B, N, num_taps H]; hidden bf16[B, N, H] after the final norm, 0 for padding; with
  // `newest` bf16[B, H], 0 for rows without tokens: the last layer leaves keys and values of all tokens, and goes on with
  // the last one of each row. No tap may then be `layers`.
  void forward(Pool& pool, const Block& block, const int32_t* taps, int num_taps, bf16* tapped, bf16* hidden) {
    const int size = spec.hidden;
    int rows = place(block);
    reserve(rows);
    if (rows == 0) return;
    embed(pool, block, rows);
    for (int i = 0; i < spec.layers; ++i) {
      tap(pool, i, taps, num_taps, tapped, rows);
      const Layer& layer = layers[i];
      const bool last = i + 1 == spec.layers;
      const float* after = last ? final_norm.get() : layers[i + 1].input_norm.get();
      const int width = (spec.heads + 2 * spec.kv_heads) * spec.dim;
      multiply_scaled(pool, stream_.scaled.get(), padded(size), rows, layer.qkv, &layer.output, stream_.scale.get(),
                      qkv_.get(), width, width);
      CachedAttention::Call c = call(block, layer, i);
      c.newest = last && block.newest;
      attention_.run(pool, c);
      if (c.newest) rows = keep_newest(block);
      multiply_add(pool, mixed_.get(), padded(spec.heads * spec.dim), rows, layer.output, &layer.gate_up, stream_, size,
                   layer.post_norm.get(), spec.eps);
      multiply_gated(pool, stream_.scaled.get(), padded(size), rows, layer.gate_up, &layer.down, stream_.scale.get(),
                     active_.get(), spec.inner);
      multiply_add(pool, active_.get(), padded(spec.inner), rows, layer.down, last ? &head : &layers[i + 1].qkv,
                   stream_, size, after, spec.eps);
    }
    tap(pool, spec.layers, taps, num_taps, tapped, rows);
    each_row(pool, rows, [&](int x) {
      const __m512 scale = _mm512_set1_ps(stream_.scale.get()[x]);
      bf16* to = hidden + static_cast<size_t>(slot_[x]) * size;
      for (int c = 0; c < size; c += kLanes) {
        const __m512 h = _mm512_loadu_ps(stream_.hidden.get() + static_cast<size_t>(x) * size + c);
        store_bf16(to + c, _mm512_mul_ps(_mm512_mul_ps(h, scale), _mm512_loadu_ps(final_norm.get() + c)));
      }
    });
  }

  // bf16[X, H] -> f32[X, V]
  void logits(Pool& pool, const bf16* hidden, int rows, size_t out_stride, float* out) {
    const int size = spec.hidden;
    reserve(rows);
    for (int x = 0; x < rows; ++x)
      std::copy_n(hidden + static_cast<size_t>(x) * size, size, stream_.scaled.get() + static_cast<size_t>(x) * padded(size));
    multiply_scaled(pool, stream_.scaled.get(), padded(size), rows, head, &layers[0].qkv, nullptr, out, spec.vocab,
                    out_stride);
  }

 private:
  // Moves what the rest of a layer needs of each row's last token to the front; the number of rows that have one.
  int keep_newest(const Block& block) {
    const size_t size = spec.hidden, ld = padded(spec.heads * spec.dim);
    int kept = 0;
    for (int b = 0; b < block.batch; ++b) {
      if (count_[b] == 0) continue;
      const size_t x = first_[b] + count_[b] - 1;  // x >= kept: nothing is lost
      std::copy_n(mixed_.get() + x * ld, spec.heads * spec.dim, mixed_.get() + kept * ld);
      std::copy_n(stream_.hidden.get() + x * size, size, stream_.hidden.get() + kept * size);
      slot_[kept++] = b;
    }
    return kept;
  }

  template <class Fn>
  static void each_row(Pool& pool, int rows, Fn&& fn) {
    constexpr int kTogether = 8;
    pool.run((rows + kTogether - 1) / kTogether, [&](int piece, int) {
      for (int x = piece * kTogether; x < std::min(rows, (piece + 1) * kTogether); ++x) fn(x);
    });
  }

  // Leaves padding out: token x of the call sits in output slot slot_[x]. Returns the number of tokens.
  int place(const Block& block) {
    slot_.clear();
    first_.clear(), count_.clear(), position_.clear();
    most_ = longest_ = 0;
    for (int b = 0; b < block.batch; ++b) {
      const int count = static_cast<int>(block.counts[b]), start = static_cast<int>(block.lengths[b]);
      first_.push_back(static_cast<int>(slot_.size()));
      count_.push_back(count);
      position_.push_back(start);
      most_ = std::max(most_, count);
      longest_ = std::max(longest_, start + count);
      for (int n = 0; n < count; ++n) slot_.push_back(b * block.width + n);
    }
    return static_cast<int>(slot_.size());
  }

  void reserve(int rows) {
    stream_.reserve(rows, spec.hidden);
    qkv_.reserve(static_cast<size_t>(rows) * (spec.heads + 2 * spec.kv_heads) * spec.dim);
    mixed_.reserve(static_cast<size_t>(rows) * padded(spec.heads * spec.dim));
    active_.reserve(static_cast<size_t>(rows) * padded(spec.inner));
  }

  void embed(Pool& pool, const Block& block, int rows) {
    each_row(pool, rows, [&](int x) {
      const bf16* from = embedding + static_cast<size_t>(block.tokens[slot_[x]]) * spec.hidden;
      __m512 square = _mm512_setzero_ps();
      for (int c = 0; c < spec.hidden; c += kLanes)
        stream_.put(x, spec.hidden, c, widen(from + c), layers[0].input_norm.get(), square);
      stream_.squares.get()[x] = _mm512_reduce_add_ps(square);
    });
    stream_.finish_scale(rows, 1, spec.hidden, spec.eps);
  }

  void tap(Pool& pool, int layer, const int32_t* taps, int num_taps, bf16* tapped, int rows) {
    for (int t = 0; t < num_taps; ++t) {
      if (taps[t] != layer) continue;
      each_row(pool, rows, [&](int x) {
        bf16* to = tapped + (static_cast<size_t>(slot_[x]) * num_taps + t) * spec.hidden;
        const float* from = stream_.hidden.get() + static_cast<size_t>(x) * spec.hidden;
        for (int c = 0; c < spec.hidden; c += kLanes) store_bf16(to + c, _mm512_loadu_ps(from + c));
      });
    }
  }

  CachedAttention::Call call(const Block& block, const Layer& layer, int index) const {
    CachedAttention::Call c{};
    c.qkv = qkv_.get();
    c.cosine = cosine.get(), c.sine = sine.get();
    if (spec.qk_norm) c.query_norm = layer.query_norm.get(), c.key_norm = layer.key_norm.get();
    c.first = first_.data(), c.count = count_.data(), c.position = position_.data();
    c.rows = block.rows;
    c.batch = block.batch, c.most = most_, c.longest = longest_;
    c.cache = block.caches[index];
    c.row_stride = block.row_stride, c.head_stride = block.head_stride;
    c.out = mixed_.get();
    return c;
  }

  CachedAttention attention_;
  Stream stream_;
  Buffer<float> qkv_;
  Buffer<bf16> mixed_, active_;
  std::vector<int> slot_, first_, count_, position_;
  int most_ = 0, longest_ = 0;
};

}  // namespace leadout
