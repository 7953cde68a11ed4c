// The EAGLE-3 draft head over its own cache: true entries in batches, own drafts one by one.
//
// Entry j joins the feature of the token before with the embedding of token j; see `leadout.models.eagle3`. Only the
// newest entry of a row goes through the layer after attention; the others leave keys and values.
#pragma once
#include <stdexcept>

#include "layers.hpp"
#include "sampling.hpp"

namespace leadout {

struct HeadSpec {
  int32_t hidden, heads, kv_heads, dim, inner, vocab, target, num_taps;
  int32_t fc_norm, norm_before_fc, norm_before_residual;
  float eps;
};

// B rows of M entries, of which counts[b] are real, at cache positions starts[b] on.
struct Entries {
  const bf16* taps;        // bf16[B, M, num_taps target], with `depth` bf16[S, depth, ..] by `rows`; null: `features`
  const float* features;   // f32[B, H], M = 1
  const bf16* embeddings;  // bf16[B, M, H]
  const int64_t *counts, *starts, *rows;
  int32_t batch, width;
  bf16* cache;
  int64_t row_stride, head_stride;
  int64_t depth;
};

// B rows that draft K tokens each after the entries that wait in their slots, which are run first.
struct Drafting {
  const bf16* taps;       // bf16[S, depth, num_taps target]
  const int64_t* tokens;  // i64[S, depth]
  const bf16* embedding;  // bf16[num_embeddings, H]
  const int64_t *slots, *counts, *starts;  // i64[B]: entries that wait, and the cache position of the first
  const int64_t* ids;                      // i64[V]: the policy's id of each column, or null: the same
  const double *temperatures, *uniforms;   // f64[B], f64[B, width]
  bf16* cache;
  int64_t *columns, *drafted;  // i64[B, K]
  float* probs;                // f32[B, K, V]
  int64_t depth, num_embeddings, width, row_stride, head_stride;
  int32_t batch, drafts;
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
      for (int x = 0; x < rows; ++x) fuse(e.taps + tapped_[x] * fused, input_.get() + x * stride(fused));
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

  // The drafts, their columns of the draft vocabulary and the laws they were drawn from.
  Judged draft(Pool& pool, const Drafting& d) {
    const int size = spec.hidden, blocks = (spec.vocab + kLawBlock - 1) / kLawBlock;
    const size_t ld = static_cast<size_t>(blocks) * kLawBlock;
    Entries e{};
    if (!gather(d, e)) return kOutside;
    drafted_.reserve(static_cast<size_t>(d.batch) * size);
    laws_.reserve(d.batch * ld);
    sums_.reserve(static_cast<size_t>(d.batch) * blocks);
    starts_.assign(d.starts, d.starts + d.batch);
    for (int b = 0; b < d.batch; ++b) starts_[b] += d.counts[b];
    ones_.assign(d.batch, 1);
    run(pool, e, drafted_.get());
    for (int k = 0;; ++k) {
      logits(pool, drafted_.get(), d.batch, ld, laws_.get());
      std::atomic<bool> finite{true};
      pool.run(d.batch, [&](int b, int) {
        if (!draw(d, b, k, laws_.get() + b * ld, blocks, sums_.get() + static_cast<size_t>(b) * blocks)) finite = false;
      });
      if (!finite) return kNotFinite;
      if (k + 1 == d.drafts) return kRight;
      for (int b = 0; b < d.batch; ++b) {
        const int64_t token = d.drafted[static_cast<size_t>(b) * d.drafts + k];
        if (token < 0 || token >= d.num_embeddings) return kOutside;
        std::copy_n(d.embedding + token * size, size, embeddings_.get() + static_cast<size_t>(b) * size);
      }
      e.taps = nullptr, e.depth = 0, e.features = drafted_.get();
      e.counts = ones_.data(), e.starts = starts_.data(), e.width = 1;
      run(pool, e, drafted_.get());
      for (int64_t& start : starts_) ++start;
    }
  }

 private:
  // The entries that wait as one block; their taps stay where they are.
  bool gather(const Drafting& d, Entries& e) {
    const size_t size = spec.hidden;
    for (int b = 0; b < d.batch; ++b) e.width = std::max(e.width, static_cast<int32_t>(d.counts[b]));
    embeddings_.reserve(static_cast<size_t>(d.batch) * e.width * size);
    for (int b = 0; b < d.batch; ++b)
      for (int n = 0; n < d.counts[b]; ++n) {
        const size_t from = d.slots[b] * d.depth + n, to = static_cast<size_t>(b) * e.width + n;
        const int64_t token = d.tokens[from];
        if (token < 0 || token >= d.num_embeddings) return false;
        std::copy_n(d.embedding + token * size, size, embeddings_.get() + to * size);
      }
    e.taps = d.taps, e.depth = d.depth, e.embeddings = embeddings_.get();
    e.counts = d.counts, e.starts = d.starts, e.rows = d.slots, e.batch = d.batch;
    e.cache = d.cache, e.row_stride = d.row_stride, e.head_stride = d.head_stride;
    return true;
  }

  // Draft k of row b from its logits, which become the weights of its law.
  bool draw(const Drafting& d, int b, int k, float* law, int blocks, float* sums) const {
    __m512 all = _mm512_setzero_ps();
    for (int v = 0; v < spec.vocab; v += kLanes)
      all = _mm512_add_ps(all, _mm512_maskz_loadu_ps(mask_of(spec.vocab - v), law + v));
    if (!std::isfinite(_mm512_reduce_add_ps(all))) return false;
    double total = 0.0;
    law_row(law, spec.vocab, blocks, d.temperatures[b], sums, &total);
    const size_t y = static_cast<size_t>(b) * d.drafts + k;
    const int64_t column = draw_row(law, blocks, sums, d.uniforms[b * d.width + k]);
    d.columns[y] = column;
    d.drafted[y] = d.ids ? d.ids[column] : column;
    float* probs = d.probs + y * spec.vocab;
    const __m512 whole = _mm512_set1_ps(static_cast<float>(total));
    for (int v = 0; v < spec.vocab; v += kLanes) {
      const __mmask16 in = mask_of(spec.vocab - v);
      _mm512_mask_storeu_ps(probs + v, in, _mm512_div_ps(_mm512_loadu_ps(law + v), whole));
    }
    return true;
  }

  static size_t stride(int inputs) { return padded(inputs); }

  int place(const Entries& e) {
    slot_.clear(), tapped_.clear(), first_.clear(), count_.clear(), position_.clear();
    most_ = longest_ = 0;
    for (int b = 0; b < e.batch; ++b) {
      const int count = static_cast<int>(e.counts[b]), start = static_cast<int>(e.starts[b]);
      first_.push_back(static_cast<int>(slot_.size()));
      count_.push_back(count);
      position_.push_back(start);
      most_ = std::max(most_, count);
      longest_ = std::max(longest_, start + count);
      for (int n = 0; n < count; ++n) {
        slot_.push_back(b * e.width + n);
        tapped_.push_back(e.depth ? e.rows[b] * e.depth + n : slot_.back());
      }
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
  Buffer<float> features_, qkv_, drafted_, laws_, sums_;
  Buffer<bf16> input_, mixed_, active_, embeddings_;
  std::vector<int> slot_, first_, count_, position_;
  std::vector<int64_t> tapped_, starts_, ones_;
  int most_ = 0, longest_ = 0;
};

}  // namespace leadout
