// The EAGLE-3 draft head over its own cache: true entries in batches, own drafts one by one.
//
// Entry j joins the feature of the token before with the embedding of token j; see `leadout.models.eagle3`. Only the
// newest entry of a row goes through the layer after attention; the others leave keys and values.
#pragma once
#include <stdexcept>

#include "layers.hpp"

namespace leadout {

struct HeadSpec {
  int32_t hidden, heads, kv_heads, dim, inner, vocab, target, num_taps;
  int32_t fc_norm, norm_before_fc, norm_before_residual;
  float eps;
};

// B rows of M entries, of which counts[b] are real, at cache positions starts[b] on.
struct Entries {
  const bf16* taps;        // bf16[B, M, num_taps target], or null: then `features`
  const float* features;   // f32[B, H], M = 1
  const bf16* embeddings;  // bf16[B, M, H]
  const int64_t *counts, *starts, *rows;
  int32_t batch, width;
  bf16* cache;
  int64_t row_stride, head_stride;
};

class DraftHead {
 public:
  explicit DraftHead(const HeadSpec& spec)
      : spec(spec), attention_(spec.heads, spec.kv_heads, spec.dim, spec.eps) {
    if (!attend_for(spec.dim) || spec.hidden % kLanes || spec.inner % kLanes || spec.target % kLanes)
      throw std::invalid_argument("shape");
  }

  const HeadSpec spec;
  Linear fc, qkv, output, gate_up, down, lm_head;
  Buffer<float> fuse_norm, hidden_norm, input_norm, post_norm, final_norm, cosine, sine;

  // f32[B, H]: the layer's output for the newest entry of every row.
  void run(Pool& pool, const Entries& e, float* out) {
    const int rows = place(e), size = spec.hidden, fused = spec.num_taps * spec.target;
    const int width = (spec.heads + 2 * spec.kv_heads) * spec.dim;
    if (rows == 0) return;
    stream_.reserve(std::max(rows, e.batch), size);
    input_.reserve(static_cast<size_t>(rows) * padded(std::max(fused, 2 * size)));
    features_.reserve(static_cast<size_t>(rows) * size);
    qkv_.reserve(static_cast<size_t>(rows) * width);
    mixed_.reserve(static_cast<size_t>(rows) * padded(spec.heads * spec.dim));
    active_.reserve(static_cast<size_t>(e.batch) * padded(spec.inner));
    const float* features = e.features;
    if (e.taps) {
      for (int x = 0; x < rows; ++x) fuse(e.taps + static_cast<size_t>(slot_[x]) * fused, input_.get() + x * stride(fused));
      multiply_scaled(pool, input_.get(), padded(fused), rows, fc, &qkv, nullptr, features_.get(), size, size);
      features = features_.get();
    }
    for (int x = 0; x < rows; ++x) {
      const bf16* embedding = e.embeddings + static_cast<size_t>(slot_[x]) * size;
      bf16* to = input_.get() + x * stride(2 * size);
      norm_bf16(embedding, input_norm.get(), to);
      norm_row(features + static_cast<size_t>(x) * size, hidden_norm.get(), to + size);
    }
    multiply_scaled(pool, input_.get(), padded(2 * size), rows, qkv, &output, nullptr, qkv_.get(), width, width);
    attention_.run(pool, call(e));
    for (int b = 0; b < e.batch; ++b) {
      const int x = first_[b] + count_[b] - 1;
      const size_t ld = padded(spec.heads * spec.dim);
      std::copy_n(mixed_.get() + x * ld, spec.heads * spec.dim, mixed_.get() + b * ld);  // x >= b: nothing is lost
      float* residual = stream_.hidden.get() + static_cast<size_t>(b) * size;
      const float* feature = features + static_cast<size_t>(x) * size;
      if (spec.norm_before_residual) {
        const float s = scale(feature);
        for (int c = 0; c < size; ++c) residual[c] = feature[c] * s * hidden_norm.get()[c];
      } else {
        std::copy_n(feature, size, residual);
      }
    }
    multiply_add(pool, mixed_.get(), padded(spec.heads * spec.dim), e.batch, output, &gate_up, stream_, size,
                 post_norm.get(), spec.eps);
    multiply_gated(pool, stream_.scaled.get(), padded(size), e.batch, gate_up, &down, stream_.scale.get(), active_.get(),
                   spec.inner);
    multiply_add(pool, active_.get(), padded(spec.inner), e.batch, down, &lm_head, stream_, size, final_norm.get(),
                 spec.eps);
    std::copy_n(stream_.hidden.get(), static_cast<size_t>(e.batch) * size, out);
  }

  // f32[B, H] -> f32[B, V] of rows `out_stride` apart.
  void logits(Pool& pool, const float* hidden, int rows, size_t out_stride, float* out) {
    stream_.reserve(rows, spec.hidden);
    for (int x = 0; x < rows; ++x)
      norm_row(hidden + static_cast<size_t>(x) * spec.hidden, final_norm.get(), stream_.scaled.get() + x * stride(spec.hidden));
    multiply_scaled(pool, stream_.scaled.get(), padded(spec.hidden), rows, lm_head, nullptr, nullptr, out, spec.vocab,
                    out_stride);
  }

 private:
  static size_t stride(int inputs) { return padded(inputs); }

  int place(const Entries& e) {
    slot_.clear(), first_.clear(), count_.clear(), position_.clear();
    most_ = longest_ = 0;
    for (int b = 0; b < e.batch; ++b) {
      const int count = static_cast<int>(e.counts[b]), start = static_cast<int>(e.starts[b]);
      first_.push_back(static_cast<int>(slot_.size()));
      count_.push_back(count);
      position_.push_back(start);
      most_ = std::max(most_, count);
      longest_ = std::max(longest_, start + count);
      for (int n = 0; n < count; ++n) slot_.push_back(b * e.width + n);
    }
    return static_cast<int>(slot_.size());
  }

  static float scale_of(float square, int size, float eps) { return 1.0f / std::sqrt(square / static_cast<float>(size) + eps); }

  float scale(const float* x) const {
    __m512 square = _mm512_setzero_ps();
    for (int c = 0; c < spec.hidden; c += kLanes) {
      const __m512 v = _mm512_loadu_ps(x + c);
      square = _mm512_fmadd_ps(v, v, square);
    }
    return scale_of(_mm512_reduce_add_ps(square), spec.hidden, spec.eps);
  }

  void norm_row(const float* x, const float* weight, bf16* to) const {
    const __m512 s = _mm512_set1_ps(scale(x));
    for (int c = 0; c < spec.hidden; c += kLanes)
      store_bf16(to + c, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + c), s), _mm512_loadu_ps(weight + c)));
  }

  static void norm_part(const bf16* x, const float* weight, int size, float eps, bf16* to) {
    __m512 square = _mm512_setzero_ps();
    for (int c = 0; c < size; c += kLanes) square = _mm512_fmadd_ps(widen(x + c), widen(x + c), square);
    const __m512 s = _mm512_set1_ps(scale_of(_mm512_reduce_add_ps(square), size, eps));
    for (int c = 0; c < size; c += kLanes)
      store_bf16(to + c, _mm512_mul_ps(_mm512_mul_ps(widen(x + c), s), _mm512_loadu_ps(weight + c)));
  }

  void norm_bf16(const bf16* x, const float* weight, bf16* to) const { norm_part(x, weight, spec.hidden, spec.eps, to); }

  void fuse(const bf16* taps, bf16* to) const {
    const int fused = spec.num_taps * spec.target;
    if (spec.norm_before_fc) return norm_part(taps, fuse_norm.get(), fused, spec.eps, to);
    if (!spec.fc_norm) {
      std::copy_n(taps, fused, to);
      return;
    }
    for (int t = 0; t < spec.num_taps; ++t)
      norm_part(taps + t * spec.target, fuse_norm.get() + t * spec.target, spec.target, spec.eps, to + t * spec.target);
  }

  CachedAttention::Call call(const Entries& e) const {
    CachedAttention::Call c{};
    c.qkv = qkv_.get();
    c.cosine = cosine.get(), c.sine = sine.get();
    c.first = first_.data(), c.count = count_.data(), c.position = position_.data();
    c.rows = e.rows;
    c.batch = e.batch, c.most = most_, c.longest = longest_;
    c.newest = true;
    c.cache = e.cache;
    c.row_stride = e.row_stride, c.head_stride = e.head_stride;
    c.out = mixed_.get();
    return c;
  }

  CachedAttention attention_;
  Stream stream_;
  Buffer<float> features_, qkv_;
  Buffer<bf16> input_, mixed_, active_;
  std::vector<int> slot_, first_, count_, position_;
  int most_ = 0, longest_ = 0;
};

}  // namespace leadout
