// The thread pool: persistent threads that share out the chunks of one job at a time.
#pragma once
#include <cstddef>

namespace headrace {

// work(context, chunk) for every chunk in [0, num_chunks), each once; returns when all are done. The calling thread
// works too. Chunks must write to places of their own: who runs which of them is not defined, so results do not depend
// on the number of threads. A call from inside a job, or while another thread's job runs, is done by its caller alone.
void run_chunks(int num_chunks, void (*work)(void* context, int chunk), void* context);

template <class Function>
void parallel(int num_chunks, Function function) {
  run_chunks(num_chunks, [](void* context, int chunk) { (*static_cast<Function*>(context))(chunk); }, &function);
}

void set_num_threads(int count);  // 1 .. 256; takes effect with the next job
int num_threads();

// `count` floats of this thread's own scratch memory, 64-byte aligned, contents undefined; valid until its next call.
float* thread_scratch(size_t count);

}  // namespace headrace
