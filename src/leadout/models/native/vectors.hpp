// AVX-512 helpers: bfloat16 conversion, exponential, memory that is kind to the TLB.
#pragma once
#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace leadout {

using bf16 = uint16_t;
constexpr int kLanes = 16;

inline __m512 widen(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// Round to nearest even.
inline void store_bf16(bf16* p, __m512 x) {
  const __m256bh narrow = _mm512_cvtneps_pbh(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<const __m256i&>(narrow));
}

inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh&>(a), reinterpret_cast<__m512bh&>(b));
}

// exp(x) to about one unit in the last place; 0 far below zero.
inline __m512 exp512(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-127.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);  // Cephes expf
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(f, f), _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(y, n);
}

// x / (1 + exp(-x))
inline __m512 silu512(__m512 x) {
  const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// A block of memory on huge pages where the system has them: streaming weights through 4 KB pages costs a third of the
// bandwidth.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // At least `count` elements; the content is lost when it grows.
  T* reserve(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      data_ = nullptr;
      capacity_ = 0;
      const size_t align = count * sizeof(T) >= (2u << 20) ? 2u << 20 : 64;
      const size_t bytes = (count * sizeof(T) + align - 1) / align * align;
      data_ = static_cast<T*>(std::aligned_alloc(align, bytes));
      if (!data_) throw std::bad_alloc();
      if (align > 64) madvise(data_, bytes, MADV_HUGEPAGE);
      capacity_ = bytes / sizeof(T);
    }
    return data_;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace leadout
