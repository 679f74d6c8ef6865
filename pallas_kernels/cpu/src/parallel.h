// Shares tasks among the threads of a pool. Whoever calls works too, and waits only for tasks that another thread has
// begun: if the pool is busy, the caller does everything itself, so nothing here can wait in a circle.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <memory>


namespace jswa {

// Numbers that are not normal are zeros in every thread, whoever set it up: else results depended on who computes them.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

struct Shared {
  std::atomic<int64_t> next{0}, done{0};
};

// Runs work(task) for each task in 0 … tasks - 1. Pool: `Schedule(function)` and `num_threads()`.
template <class Pool, class Work>
void parallel(Pool& pool, int64_t tasks, const Work& work) {
  const int64_t helpers = (pool.num_threads() < tasks ? pool.num_threads() : tasks) - 1;
  if (helpers <= 0) {
    FlushDenormals flush;
    for (int64_t task = 0; task < tasks; task++) work(task);
    return;
  }
  // A helper may begin after this call has returned: then it finds no task, and must not touch `work`.
  auto shared = std::make_shared<Shared>();
  const Work* borrowed = &work;
  auto run = [shared, borrowed, tasks] {
    FlushDenormals flush;
    for (int64_t task; (task = shared->next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      (*borrowed)(task);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(decltype(run)(run));
  run();
  while (shared->done.load(std::memory_order_acquire) < tasks) _mm_pause();
}

}  // namespace jswa
