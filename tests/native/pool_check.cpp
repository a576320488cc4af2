// The thread pool under a race detector: jobs of every size, one after the other and from two threads at once, with
// changing numbers of threads, sleeps between them, and a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

using namespace headrace;

static void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Every chunk once, on memory that is not atomic: a job that ends too early is a race, and a wrong sum.
static void jobs(int count, int salt) {
  std::vector<int> seen;
  for (int job = 0; job < count; ++job) {
    const int chunks = (job * 7 + salt) % 90;
    seen.assign(static_cast<size_t>(chunks), 0);
    parallel(chunks, [&](int chunk) {
      seen[static_cast<size_t>(chunk)] += chunk + 1;
      float* scratch = thread_scratch(100 + static_cast<size_t>(chunk) * 50);
      scratch[0] = scratch[99 + chunk * 50] = 1.0f;
      int parts[3];
      parallel(3, [&](int inner) { parts[inner] = inner - 1; });  // from inside
      seen[static_cast<size_t>(chunk)] += parts[0] + parts[1] + parts[2];
    });
    for (int chunk = 0; chunk < chunks; ++chunk) check(seen[static_cast<size_t>(chunk)] == chunk + 1, "chunk");
    if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough to fall asleep
  }
}

int main() {
  for (int threads : {4, 1, 2, 7, 3}) {
    set_num_threads(threads);
    check(num_threads() == threads, "number of threads");
    jobs(2000, threads);
  }
  std::thread other([] { jobs(2000, 5); });
  jobs(2000, 11);
  other.join();
  const pid_t child = fork();
  if (child == 0) {
    jobs(300, 1);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  check(status == 0, "child");
  jobs(300, 2);
  std::puts("ok");
  return 0;
}
