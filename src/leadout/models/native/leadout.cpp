// The C interface of the native kernels; see decoder.hpp, draft_head.hpp, sampling.hpp. Sizes are the caller's to check,
// and `leadout.models.native` does.
#include <cstring>

#include "decoder.hpp"
#include "draft_head.hpp"
#include "filters.hpp"
#include "output_head.hpp"
#include "sampling.hpp"
#include "train_layer.hpp"

using namespace leadout;

namespace {
void copy(Buffer<float>& to, const float* from, size_t count) {
  if (from) std::memcpy(to.reserve(count), from, count * sizeof(float));
}
}  // namespace

extern "C" {

int lo_has_kernels(int dim) { return attend_for(dim) != nullptr; }

void lo_configure(int threads, int spin_us) {
  std::lock_guard<std::mutex> lock(Pool::shared().guard);
  Pool::shared().configure(threads, spin_us);
}

void* lo_decoder_new(const Spec* spec) { return new Decoder(*spec); }
void lo_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

// Weights are bf16[O, I] as in the checkpoint, parts stacked; biases, norms and angles float32; absent ones null.
void lo_decoder_layer(void* decoder, int index, const bf16* qkv, const float* qkv_bias, const bf16* output,
                      const float* output_bias, const bf16* gate_up, const float* gate_up_bias, const bf16* down,
                      const float* down_bias, const float* input_norm, const float* post_norm, const float* query_norm,
                      const float* key_norm) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  Decoder& d = *static_cast<Decoder*>(decoder);
  Layer& layer = d.layers[index];
  const Spec& s = d.spec;
  const auto same = [](int c) { return c; };
  layer.qkv.pack(pool, qkv, qkv_bias, s.hidden, (s.heads + 2 * s.kv_heads) * s.dim, same);
  layer.output.pack(pool, output, output_bias, s.heads * s.dim, s.hidden, same);
  layer.gate_up.pack(pool, gate_up, gate_up_bias, s.hidden, 2 * s.inner, [&](int c) { return gate_up_source(c, s.inner); });
  layer.down.pack(pool, down, down_bias, s.inner, s.hidden, same);
  copy(layer.input_norm, input_norm, s.hidden);
  copy(layer.post_norm, post_norm, s.hidden);
  copy(layer.query_norm, query_norm, s.dim);
  copy(layer.key_norm, key_norm, s.dim);
}

// `embedding` must live as long as it is used; angles are f32[positions, D/2].
void lo_decoder_ends(void* decoder, const bf16* embedding, const bf16* head, const float* final_norm,
                     const float* cosine, const float* sine, int positions) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  Decoder& d = *static_cast<Decoder*>(decoder);
  d.embedding = embedding;
  d.head.pack(pool, head, nullptr, d.spec.hidden, d.spec.vocab, [](int c) { return c; });
  copy(d.final_norm, final_norm, d.spec.hidden);
  copy(d.cosine, cosine, static_cast<size_t>(positions) * (d.spec.dim / 2));
  copy(d.sine, sine, static_cast<size_t>(positions) * (d.spec.dim / 2));
}

void lo_decoder_forward(void* decoder, const Block* block, const int32_t* taps, int num_taps, bf16* tapped,
                        bf16* hidden) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<Decoder*>(decoder)->forward(pool, *block, taps, num_taps, tapped, hidden);
}

void lo_decoder_logits(void* decoder, const bf16* hidden, int rows, int64_t stride, float* out) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<Decoder*>(decoder)->logits(pool, hidden, rows, stride, out);
}

void* lo_head_new(const HeadSpec* spec) { return new DraftHead(*spec); }
void lo_head_free(void* head) { delete static_cast<DraftHead*>(head); }

// As for layers; `fuse_norm` f32[num_taps target] or null, angles f32[positions, D/2].
void lo_head_load(void* head, const bf16* fc, const bf16* qkv, const bf16* output, const bf16* gate_up, const bf16* down,
                  const bf16* lm_head, const float* fuse_norm, const float* hidden_norm, const float* input_norm,
                  const float* post_norm, const float* final_norm, const float* cosine, const float* sine,
                  int positions) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  DraftHead& h = *static_cast<DraftHead*>(head);
  const HeadSpec& s = h.spec;
  const auto same = [](int c) { return c; };
  h.fc.pack(pool, fc, nullptr, s.num_taps * s.target, s.hidden, same);
  h.qkv.pack(pool, qkv, nullptr, 2 * s.hidden, (s.heads + 2 * s.kv_heads) * s.dim, same);
  h.output.pack(pool, output, nullptr, s.heads * s.dim, s.hidden, same);
  h.gate_up.pack(pool, gate_up, nullptr, s.hidden, 2 * s.inner, [&](int c) { return gate_up_source(c, s.inner); });
  h.down.pack(pool, down, nullptr, s.inner, s.hidden, same);
  h.lm_head.pack(pool, lm_head, nullptr, s.hidden, s.vocab, same);
  copy(h.fuse_norm, fuse_norm, static_cast<size_t>(s.num_taps) * s.target);
  copy(h.hidden_norm, hidden_norm, s.hidden);
  copy(h.input_norm, input_norm, s.hidden);
  copy(h.post_norm, post_norm, s.hidden);
  copy(h.final_norm, final_norm, s.hidden);
  copy(h.cosine, cosine, static_cast<size_t>(positions) * (s.dim / 2));
  copy(h.sine, sine, static_cast<size_t>(positions) * (s.dim / 2));
}

void lo_head_run(void* head, const Entries* entries, float* out) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<DraftHead*>(head)->run(pool, *entries, out);
}

void lo_head_logits(void* head, const float* hidden, int rows, int64_t stride, float* out) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<DraftHead*>(head)->logits(pool, hidden, rows, stride, out);
}

// Whole drafts of several tokens; a `Judged`.
int lo_head_draft(void* head, const Drafting* drafting) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  return static_cast<DraftHead*>(head)->draft(pool, *drafting);
}

void* lo_train_layer_new(const TrainSpec* spec) { return new TrainLayer(*spec); }
void lo_train_layer_free(void* layer) { delete static_cast<TrainLayer*>(layer); }

void lo_train_layer_forward(void* layer, const Pack* pack, const TrainWeights* weights, const float* x,
                            const Kept* kept, float* out) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<TrainLayer*>(layer)->forward(pool, *pack, *weights, x, *kept, out);
}

void lo_train_layer_backward(void* layer, const Pack* pack, const TrainWeights* weights, const float* x,
                             const Kept* kept, const float* dout, float* dx, const TrainWeights* gradients) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<TrainLayer*>(layer)->backward(pool, *pack, *weights, x, *kept, dout, dx, *gradients);
}

void* lo_output_head_new() { return new OutputHead; }
void lo_output_head_free(void* head) { delete static_cast<OutputHead*>(head); }

void lo_output_head_logits(void* head, const float* hidden, const float* weight, int rows, int size, int vocab,
                           float* out) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<OutputHead*>(head)->logits(pool, hidden, weight, rows, size, vocab, out);
}

void lo_output_head_law(const float* logits, int rows, int vocab, float temperature, const int64_t* targets,
                        float* logprobs, float* entropies, float* normalizers) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  OutputHead::law(pool, logits, rows, vocab, temperature, targets, logprobs, entropies, normalizers);
}

void lo_output_head_back(void* head, const float* hidden, const float* weight, const float* logits, int rows, int size,
                         int vocab, float temperature, const int64_t* targets, const float* normalizers,
                         const float* slopes, float* dhidden, float* dweight, int add) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  static_cast<OutputHead*>(head)->back(pool, hidden, weight, logits, rows, size, vocab, temperature, targets,
                                       normalizers, slopes, dhidden, dweight, add != 0);
}

// In place on f32[X, stride]; temperatures f64[X / times]; sums f32[X, blocks]; totals f64[X].
void lo_law(float* logits, int rows, int64_t stride, int vocab, const double* temperatures, int times, float* sums,
            double* totals) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  const int blocks = (vocab + kLawBlock - 1) / kLawBlock;
  pool.run(rows, [&](int x, int) {
    law_row(logits + x * stride, vocab, blocks, temperatures[x / times], sums + static_cast<size_t>(x) * blocks, totals + x);
  });
}

// f32[X, stride] -> f32[X, stride]: weights outside top-k, top-p and min-p become 0; see filter_row.
void lo_filter(const float* weights, int rows, int64_t stride, const int64_t* top_k, const double* top_p,
               const double* min_p, float* out) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  pool.run(rows, [&](int x, int) {
    filter_row(weights + x * stride, static_cast<int>(stride), top_k[x], top_p[x], min_p[x], out + x * stride);
  });
}

void lo_draw(const float* weights, int rows, int64_t stride, int blocks, const float* sums, const double* uniforms,
             int64_t* ids) {
  for (int x = 0; x < rows; ++x)
    ids[x] = draw_row(weights + x * stride, blocks, sums + static_cast<size_t>(x) * blocks, uniforms[x]);
}

// f64[X]: the logarithm of the probability of token ids[x] under law x; false if an id is out of range.
int lo_logprobs(const float* weights, int rows, int64_t stride, const double* totals, const int64_t* ids, double* out) {
  for (int x = 0; x < rows; ++x) {
    if (ids[x] < 0 || ids[x] >= stride) return 0;
    out[x] = std::log(static_cast<double>(weights[x * stride + ids[x]]) / totals[x]);
  }
  return 1;
}

// A `Judged` of all rows.
int lo_judge(const Judgement* judgement) {
  Pool& pool = Pool::shared();
  std::lock_guard<std::mutex> lock(pool.guard);
  std::atomic<int> all{kRight};
  pool.run(judgement->batch, [&](int b, int) {
    const Judged one = judge_row(*judgement, b);
    if (one != kRight) all = one;
  });
  return all;
}

// Row to[x] of `target` becomes row from[x] of `source`.
void lo_copy_rows(char* target, const int64_t* to, const char* source, const int64_t* from, int64_t rows,
                  int64_t bytes) {
  for (int64_t x = 0; x < rows; ++x) std::memcpy(target + to[x] * bytes, source + from[x] * bytes, bytes);
}

// `second` is the counter's second word: start of the round and purpose.
void lo_uniforms(int count, const uint64_t* seed, const uint32_t* position, const uint32_t* second,
                 const uint32_t* sibling, const uint32_t* draw, double* out) {
  for (int i = 0; i < count; ++i) out[i] = philox_uniform(seed[i], position[i], second[i], sibling[i], draw[i]);
}

// f64[purposes, rows, width]: the numbers of every purpose for the positions start[b].. of each row's round; purpose 0
// ignores where the round began.
void lo_round_uniforms(int purposes, int shift, int rows, int width, const uint64_t* seed, const int64_t* draw,
                       const int64_t* sibling, const int64_t* start, double* out) {
  for (int purpose = 0; purpose < purposes; ++purpose)
    for (int b = 0; b < rows; ++b)
      for (int w = 0; w < width; ++w) {
        const uint32_t second = purpose ? static_cast<uint32_t>(start[b]) | static_cast<uint32_t>(purpose) << shift : 0;
        *out++ = philox_uniform(seed[b], static_cast<uint32_t>(start[b] + w), second, static_cast<uint32_t>(sibling[b]),
                                static_cast<uint32_t>(draw[b]));
      }
}
}
