// Times cub's device-wide radix sort on keys like those of the argsort kernel: pairs of destination and index, sorted
// by only the bits that destinations use. Prints JSON; checks the result against std::stable_sort.
//
// bench/gpu/run --build compiles it on machines without a GPU.
#include <cub/device/device_radix_sort.cuh>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using u32 = unsigned int;

static void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "error: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Buffers {
  u32 *keys, *values, *sorted_keys, *permutation;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
};

static void sort(Buffers& b, int items, int bits, cudaStream_t stream) {
  check(cub::DeviceRadixSort::SortPairs(b.scratch, b.scratch_bytes, b.keys, b.sorted_keys, b.values, b.permutation, items, 0, bits, stream),
        "SortPairs");
}

// Microseconds of one sort: the median over replays of a graph of 20 sorts, which hides launch latency.
static double microseconds(Buffers& b, int items, int bits) {
  constexpr int AT_ONCE = 20, WARM_UP = 5, RUNS = 50;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < AT_ONCE; ++i) sort(b, items, bits, stream);
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begun, ended;
  check(cudaEventCreate(&begun), "cudaEventCreate");
  check(cudaEventCreate(&ended), "cudaEventCreate");
  std::vector<double> times;
  for (int run = 0; run < WARM_UP + RUNS; ++run) {
    check(cudaEventRecord(begun, stream), "cudaEventRecord");
    check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    check(cudaEventRecord(ended, stream), "cudaEventRecord");
    check(cudaEventSynchronize(ended), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begun, ended), "cudaEventElapsedTime");
    if (run >= WARM_UP) times.push_back(milliseconds * 1000.0 / AT_ONCE);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int main(int count, char** arguments) {
  std::mt19937 random(count > 1 ? static_cast<u32>(std::strtoul(arguments[1], nullptr, 10)) : 0);
  const int sizes[][2] = {{1024, 8}, {4096, 8}, {8192, 8}, {8192, 64}};
  bool good = true;
  std::string rows;
  for (const auto& [items, ranks] : sizes) {
    std::vector<u32> keys(items), values(items), permutation(items), expected(items);
    for (u32& key : keys) key = random() % static_cast<u32>(ranks);
    std::iota(values.begin(), values.end(), 0u);
    expected = values;
    std::stable_sort(expected.begin(), expected.end(), [&](u32 a, u32 b) { return keys[a] < keys[b]; });
    const size_t bytes = sizeof(u32) * static_cast<size_t>(items);
    int bits = 0;
    while (1 << bits < ranks) ++bits;
    Buffers b;
    for (u32** buffer : {&b.keys, &b.values, &b.sorted_keys, &b.permutation}) check(cudaMalloc(buffer, bytes), "cudaMalloc");
    check(cudaMemcpy(b.keys, keys.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemcpy(b.values, values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    sort(b, items, bits, nullptr);
    check(cudaMalloc(&b.scratch, b.scratch_bytes), "cudaMalloc");
    const double time = microseconds(b, items, bits);
    check(cudaMemcpy(permutation.data(), b.permutation, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const bool equal = permutation == expected;
    good = good && equal;
    char row[128];
    std::snprintf(row, sizeof row, "%s{\"items\": %d, \"ranks\": %d, \"us\": %.3f, \"equal\": %s}", rows.empty() ? "" : ", ", items, ranks,
                  time, equal ? "true" : "false");
    rows += row;
  }
  std::printf("{\"sorts\": [%s]}\n", rows.c_str());
  return good ? 0 : 1;
}
