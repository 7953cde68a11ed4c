// Threads that share numbered pieces of work, for phases of a few microseconds.
//
// A decode step is some 150 phases, so waking threads or waiting at barriers would cost more than the work. The caller
// publishes a phase and works on it itself; helpers that are awake take pieces from their own half and then from the
// others'. A phase is over when every piece is done, not when every thread has arrived: a helper that the system has
// taken off its core delays nothing unless it holds a piece.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace leadout {

class Pool {
 public:
  static Pool& shared() {
    static Pool* pool = new Pool;  // Never destroyed: helpers may outlive static destructors.
    return *pool;
  }

  // Held for a whole call into the library: phases of two callers must not mix.
  std::mutex guard;

  int threads() const { return threads_; }

  // Number of threads, the caller included, and how long idle helpers spin before they sleep.
  void configure(int threads, int spin_us) {
    spin_us_ = spin_us;
    const bool forked = owner_ != getpid();  // The helpers of a parent process are not here.
    if (threads == threads_ && !forked) return;
    if (!forked) stop();
    owner_ = getpid();
    threads_ = threads;
    state_ = new State(threads);  // The old one is left to helpers that may still look at it; this is rare and small.
    for (int t = 1; t < threads; ++t) std::thread(&Pool::help, this, state_, t).detach();
  }

  // fn(piece, thread) for every piece 0..count-1, neighbours mostly in order on one thread.
  template <class Fn>
  void run(int count, Fn&& fn) {
    constexpr int kMost = 0xffff;
    for (int base = 0; base < count; base += kMost) {
      const int part = count - base < kMost ? count - base : kMost;
      if (threads_ == 1 || part == 1) {
        for (int i = 0; i < part; ++i) fn(base + i, 0);
        continue;
      }
      auto shifted = [&](int piece, int thread) { fn(base + piece, thread); };
      publish(part, [](void* c, int piece, int thread) { (*static_cast<decltype(shifted)*>(c))(piece, thread); },
              &shifted);
    }
  }

  // The pieces that `thread` starts with, to fetch their data ahead.
  int first_piece(int count, int thread) const { return static_cast<int>(static_cast<int64_t>(count) * thread / threads_); }

 private:
  using Call = void (*)(void*, int, int);

  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};  // phase << 32 | first piece << 16 | end
  };

  struct State {
    explicit State(int n) : ranges(new Range[n]), num(n) {}
    std::unique_ptr<Range[]> ranges;
    int num;
    alignas(64) std::atomic<uint32_t> phase{0};
    std::atomic<int> sleepers{0};
    std::atomic<bool> stopped{false};
    alignas(64) std::atomic<int> done{0};
    alignas(64) Call call = nullptr;
    void* context = nullptr;
  };

  static uint64_t pack(uint32_t phase, int first, int end) {
    return static_cast<uint64_t>(phase) << 32 | static_cast<uint64_t>(first) << 16 | static_cast<uint64_t>(end);
  }

  void publish(int count, Call call, void* context) {
    State& s = *state_;
    const uint32_t phase = s.phase.load(std::memory_order_relaxed) + 1;
    s.call = call;
    s.context = context;
    s.done.store(0, std::memory_order_relaxed);
    for (int t = 0; t < threads_; ++t)
      s.ranges[t].word.store(pack(phase, first_piece(count, t), first_piece(count, t + 1)), std::memory_order_release);
    s.phase.store(phase);
    if (s.sleepers.load() > 0) wake(s);
    work(s, phase, 0);
    for (int spins = 0; s.done.load(std::memory_order_acquire) != count; ++spins) {
      if (spins < 4000) __builtin_ia32_pause();
      else std::this_thread::yield();  // A helper with a piece may be waiting for this very core.
    }
  }

  // Takes pieces of `phase` until none is left. A claim can only succeed while its phase is open, so that `call` and
  // `context` are those of the phase.
  static void work(State& s, uint32_t phase, int self) {
    int finished = 0;
    for (int k = 0; k < s.num; ++k) {
      const int victim = self + k < s.num ? self + k : self + k - s.num;
      std::atomic<uint64_t>& word = s.ranges[victim].word;
      uint64_t now = word.load(std::memory_order_acquire);
      while (static_cast<uint32_t>(now >> 32) == phase) {
        const int first = static_cast<int>(now >> 16 & 0xffff), end = static_cast<int>(now & 0xffff);
        if (first >= end) break;
        const bool own = k == 0;
        const uint64_t next = own ? pack(phase, first + 1, end) : pack(phase, first, end - 1);
        if (!word.compare_exchange_weak(now, next, std::memory_order_acq_rel)) continue;
        s.call(s.context, own ? first : end - 1, self);
        ++finished;
        now = word.load(std::memory_order_acquire);
      }
    }
    if (finished) s.done.fetch_add(finished, std::memory_order_acq_rel);
  }

  void help(State* state, int self) {
    State& s = *state;
    uint32_t seen = 0;
    while (!s.stopped.load(std::memory_order_relaxed)) {
      const uint32_t phase = s.phase.load(std::memory_order_acquire);
      if (phase != seen) {
        seen = phase;
        work(s, phase, self);
      } else {
        await(s, seen);
      }
    }
  }

  void await(State& s, uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_.load());
    do {
      for (int i = 0; i < 64; ++i) {
        if (s.phase.load(std::memory_order_acquire) != seen) return;
        __builtin_ia32_pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    s.sleepers.fetch_add(1);
    if (s.phase.load() == seen && !s.stopped.load())
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&s.phase), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    s.sleepers.fetch_sub(1);
  }

  static void wake(State& s) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&s.phase), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void stop() {
    if (!state_) return;
    state_->stopped.store(true);
    state_->phase.fetch_add(1);
    wake(*state_);
  }

  State* state_ = nullptr;
  int threads_ = 0;
  pid_t owner_ = 0;
  std::atomic<int> spin_us_{100};
};

}  // namespace leadout
