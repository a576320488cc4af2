// Chunks of a job are split evenly over the threads, in order, so that each reads one contiguous stretch of weights;
// a thread that has finished its own share takes from the others'. So a core that is slow, or taken by another process,
// delays a job by one chunk at most, and a thread that is still asleep by nothing.
//
// Every share is one atomic word (job number, end, next chunk). Taking a chunk is a compare-and-swap of the whole word,
// so a thread that comes late cannot take from a job it has not seen: the number would differ. The job's function and
// context are read only after a chunk has been taken, and a job cannot end before that chunk is done and reported.
//
// Between jobs a thread spins for some tens of microseconds, about as long as the gap between two operations of a step,
// then sleeps on a condition variable.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(40);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or the time is up; returns whether it was ready.
template <class Ready>
bool spin(Ready ready) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    relax();
  }
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

thread_local bool inside = false;  // this thread is at work on a job's chunks

struct alignas(128) Share {
  std::atomic<uint64_t> word{0};  // job << 40 | end << 20 | next
};
constexpr uint64_t kField = (uint64_t{1} << 20) - 1;
constexpr int kMaxChunks = static_cast<int>(kField);

class Pool {
 public:
  explicit Pool(int threads) : num_threads_(threads) {
    for (int t = 1; t < threads; ++t) threads_[t] = std::thread([this, t] { serve(t); });
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (int t = 1; t < num_threads_; ++t) threads_[t].join();
  }

  int size() const { return num_threads_; }

  void run(int num_chunks, void (*work)(void*, int), void* context) {
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    left_.store(num_chunks, std::memory_order_relaxed);
    const uint64_t job = (job_.load(std::memory_order_relaxed) + 1) & 0xFFFFFF;
    for (int t = 0, first = 0; t < num_threads_; ++t) {
      const int end = static_cast<int>(static_cast<int64_t>(num_chunks) * (t + 1) / num_threads_);
      shares_[t].word.store(job << 40 | static_cast<uint64_t>(end) << 20 | static_cast<uint64_t>(first),
                            std::memory_order_release);
      first = end;
    }
    job_.store(job, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take_chunks(0, job);
    const auto done = [this] { return left_.load(std::memory_order_acquire) == 0; };
    if (spin(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.store(true, std::memory_order_seq_cst);
    finished_.wait(lock, [this] { return left_.load(std::memory_order_seq_cst) == 0; });
    waiting_.store(false, std::memory_order_relaxed);
  }

 private:
  void serve(int self) {
    inside = true;
    uint64_t seen = 0;
    for (;;) {
      const auto news = [this, seen] { return job_.load(std::memory_order_acquire) != seen; };
      if (!spin(news)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [this, seen] { return stop_ || job_.load(std::memory_order_seq_cst) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        if (stop_) return;
      }
      seen = job_.load(std::memory_order_acquire);
      take_chunks(self, seen);
    }
  }

  // What a thread has done it reports once: every report moves a cache line from one core to another.
  void take_chunks(int self, uint64_t job) {
    int done = 0;
    for (int turn = 0; turn < num_threads_; ++turn) {
      Share& share = shares_[(self + turn) % num_threads_];
      uint64_t word = share.word.load(std::memory_order_acquire);
      while (word >> 40 == job && (word & kField) < (word >> 20 & kField)) {
        if (!share.word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) continue;
        work_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), static_cast<int>(word & kField));
        ++done;
        word = share.word.load(std::memory_order_acquire);
      }
    }
    // The thread that reports the last chunk wakes the caller, if it has gone to sleep.
    if (done > 0 && left_.fetch_sub(done, std::memory_order_seq_cst) == done && waiting_.load(std::memory_order_seq_cst)) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      finished_.notify_one();
    }
  }

  const int num_threads_;
  Share shares_[kMaxThreads];
  alignas(128) std::atomic<uint64_t> job_{0};
  std::atomic<void (*)(void*, int)> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(128) std::atomic<int> left_{0};
  std::atomic<bool> waiting_{false};
  alignas(128) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  bool stop_ = false;
  std::thread threads_[kMaxThreads];
};

// The pool is made by the first job and never destroyed by the process's end (its threads may be running then). A
// forked child has none of its threads: it forgets the pool and makes its own.
Pool* pool = nullptr;
int wanted_threads = 1;
std::mutex* gate = new std::mutex;  // held while a job runs

void forget_pool() {
  pool = nullptr;
  gate = new std::mutex;
}

Pool* current_pool() {
  static const bool registered = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, forget_pool);
#endif
    return true;
  }();
  (void)registered;
  if (!pool || pool->size() != wanted_threads) {
    delete pool;
    pool = new Pool(wanted_threads);
  }
  return pool;
}

struct Scratch {
  void* memory = nullptr;
  size_t count = 0;
  ~Scratch() { std::free(memory); }
};
thread_local Scratch scratch;

}  // namespace

void run_chunks(int num_chunks, void (*work)(void*, int), void* context) {
  std::unique_lock<std::mutex> lock(*gate, std::defer_lock);
  if (num_chunks <= 1 || wanted_threads == 1 || num_chunks > kMaxChunks || inside || !lock.try_lock()) {
    for (int chunk = 0; chunk < num_chunks; ++chunk) work(context, chunk);
    return;
  }
  inside = true;
  current_pool()->run(num_chunks, work, context);
  inside = false;
}

void set_num_threads(int count) {
  const std::lock_guard<std::mutex> lock(*gate);
  wanted_threads = count < 1 ? 1 : count > kMaxThreads ? kMaxThreads : count;
}

int num_threads() { return wanted_threads; }

float* thread_scratch(size_t count) {
  if (scratch.count < count) {
    std::free(scratch.memory);
    scratch.count = 0;
    const size_t bytes = (count * sizeof(float) + 4095) / 4096 * 4096;
    scratch.memory = std::aligned_alloc(4096, bytes);
    if (!scratch.memory) std::abort();  // a few hundred KiB: nothing else would work either
    scratch.count = count;
  }
  return static_cast<float*>(scratch.memory);
}

}  // namespace headrace
