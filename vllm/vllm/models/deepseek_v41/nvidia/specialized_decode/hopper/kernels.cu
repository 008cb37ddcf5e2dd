// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of bf16 with the weights of a decode step, for SM90.
//
// A decode step multiplies each weight with 1 to 64 rows, so its time is that of
// reading the weights. Every kernel here therefore has as many weight bytes on their
// way as the chip takes, from before its inputs exist (programmatic dependent launch),
// and splits the inner dimension K over warps and over the blocks of a cluster, which
// sum in shared memory in a fixed order: equal inputs give equal bits.
//
// The weights are the left operand of mma.m16n8k16, the rows of x its 8 columns, so
// 1 to 8 rows cost the same. They are read as vLLM's loader leaves them for Marlin,
// in tiles of 16 k x 64 n, k-tile major, whose 32-bit words are fragments of that
// instruction (gptq_marlin_repack):
//   8 bits: word 8 * lane + 2 * block + half: n = 16 * block + 8 * half + lane / 4,
//           bytes k = 2 * (lane % 4) + {0, 8, 1, 9}
//   4 bits: word 4 * lane + block: nibbles {0, 4} n = lane / 4, k = 2 * (lane % 4) +
//           {0, 1}; {1, 5} k + 8; {2, 6} and {3, 7} the same of n + 8
// and scales ue8m0 [K / 32, N] (marlin_permute_scales, then bytes 0, 2, 1, 3 of four):
//           byte 8 * (n % 8) + {0, 2, 1, 3, 4, 6, 5, 7}[n / 8] of 64 n.
// A scale joins its weight in bf16, exactly, as long as the codes stay below the bounds
// that layout.py states.
//
// Compiled by NVRTC, so nothing is included.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroup = 32;     // k of one scale
constexpr int kTileRows = 64;  // n of one Marlin tile
constexpr int kMembers = 8;    // rows of x that one visit of an expert serves

// ---------------------------------------------------------------- instructions

DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Weights are read once a step: they need not displace what is read again.
DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// True in one lane of a warp that is not diverged.
DEVICE bool elected() {
  u32 elected;
  asm volatile(
      "{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected;
}

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// By one thread: `bytes` side by side, which the barrier has been told to expect.
DEVICE void copy_block(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// 16 bytes of `from`, or zeros where it is null; the barrier learns of them by the next
// arrive_when_copied() of this thread.
DEVICE void copy_piece(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(from ? 16 : 0)
               : "memory");
}

DEVICE void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier)
               : "memory");
}

// What the kernels before this one in the stream wrote may be read after it.
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE u32 cluster_size() {
  u32 size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Barriers of this block may be met by others of the cluster once they have waited.
DEVICE void cluster_arrive() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Store where `address` is in the block `rank`, and tell `barrier` there.
DEVICE void store_in_cluster(u32 address, u32 barrier, u32 rank, float value) {
  asm volatile(
      "{\n .reg .b32 remote, there;\n mapa.shared::cluster.u32 remote, %0, %2;\n"
      " mapa.shared::cluster.u32 there, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, [there];"
      "\n}" ::"r"(address),
      "r"(barrier), "r"(rank), "r"(__float_as_uint(value))
      : "memory");
}

// Not the read-only path, nor L1: an earlier kernel may have just written it.
DEVICE u32 load_word(const void* pointer) {
  u32 value;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

DEVICE float load_float(const float* pointer) { return __uint_as_float(load_word(pointer)); }

DEVICE uint4 load_vector(const void* pointer) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer)
               : "memory");
  return value;
}

DEVICE uint4 load_weights(const void* pointer) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

// The right operands of two k-tiles from rows of 8 matrices in shared memory.
DEVICE void load_matrices(u32 row, u32 (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(row)
               : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8], bf16 to float32
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

DEVICE u32 pack_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// ---------------------------------------------------------------- dequantisation
//
// The bits of a small float, moved to their places in a bf16, are its value times a
// power of two, subnormals included; one exact product takes that back and brings the
// scale.

DEVICE u32 bf16x2_of_e4m3(u32 magnitudes, u32 signs, u32 scale) {
  return multiply_bf16x2((magnitudes & 0x07f007f0u) | (signs & 0x80008000u), scale);
}

// `nibbles`: one in the low bits of each half; shifted by `kShift` where `kShift` is 4.
template <int kShift>
DEVICE u32 bf16x2_of_e2m1(u32 nibbles, u32 scale) {
  // One product puts a copy of each where its sign belongs, and one where the rest does.
  const u32 copies = (nibbles & 0x000f000fu << kShift) * (0x1040u >> kShift);
  return multiply_bf16x2(copies & 0x81c081c0u, scale);
}

// 2^120 or 2^126, by the format, times the scale of ue8m0 `code`, twice in bf16.
template <int kBits>
DEVICE u32 scale_pair(u32 code) {
  return code * 0x00800080u + (kBits == 8 ? 120 : 126) * 0x00800080u;
}

template <int kBits>
constexpr int kTileBytes = 16 * kTileRows * kBits / 8;

// Bytes of one scale group of a tile column in shared memory: 2 k-tiles, 64 scales.
template <int kBits>
constexpr int kGroupBytes = 2 * kTileBytes<kBits> + kTileRows;

// The left operands of one k-tile, a block of 16 n at a time.
template <int kBits>
struct KTile;

template <>
struct KTile<8> {
  uint4 low, high;
  DEVICE KTile(const u8* tile, int lane) {
    low = reinterpret_cast<const uint4*>(tile)[2 * lane];
    high = reinterpret_cast<const uint4*>(tile)[2 * lane + 1];
  }
  DEVICE void fragment(int block, u32 top_scale, u32 bottom_scale, u32 (&a)[4]) const {
    const uint4& four = block < 2 ? low : high;
    const u32 top = block % 2 ? four.z : four.x, bottom = block % 2 ? four.w : four.y;
    a[0] = bf16x2_of_e4m3(top << 4, top << 8, top_scale);
    a[1] = bf16x2_of_e4m3(bottom << 4, bottom << 8, bottom_scale);
    a[2] = bf16x2_of_e4m3(top >> 4, top, top_scale);
    a[3] = bf16x2_of_e4m3(bottom >> 4, bottom, bottom_scale);
  }
};

template <>
struct KTile<4> {
  uint4 words;
  DEVICE KTile(const u8* tile, int lane) {
    words = reinterpret_cast<const uint4*>(tile)[lane];
  }
  DEVICE void fragment(int block, u32 top_scale, u32 bottom_scale, u32 (&a)[4]) const {
    const u32 word = block == 0   ? words.x
                     : block == 1 ? words.y
                     : block == 2 ? words.z
                                  : words.w;
    const u32 upper = word >> 8;
    a[0] = bf16x2_of_e2m1<0>(word, top_scale);
    a[1] = bf16x2_of_e2m1<0>(upper, bottom_scale);
    a[2] = bf16x2_of_e2m1<4>(word, top_scale);
    a[3] = bf16x2_of_e2m1<4>(upper, bottom_scale);
  }
};

// sums [64 n, 8 * kColumns] += weights [64 n, 32 k] x^T, of one scale group
template <int kBits, int kColumns>
DEVICE void multiply_group(const KTile<kBits>& first, const KTile<kBits>& second,
                           uint2 codes, const u32 (&x)[kColumns][4],
                           float (&sums)[kColumns][4][4]) {
#pragma unroll
  for (int block = 0; block < 4; block++) {
    const u32 four = (block < 2 ? codes.x : codes.y) >> (block % 2 * 8);
    const u32 top = scale_pair<kBits>(four & 0xff);
    const u32 bottom = scale_pair<kBits>(four >> 16 & 0xff);
    u32 a[4];
    first.fragment(block, top, bottom, a);
#pragma unroll
    for (int column = 0; column < kColumns; column++)
      mma(sums[column][block], a, x[column][0], x[column][1]);
    second.fragment(block, top, bottom, a);
#pragma unroll
    for (int column = 0; column < kColumns; column++)
      mma(sums[column][block], a, x[column][2], x[column][3]);
  }
}

DEVICE uint2 scales_of(const u8* codes, int lane) {
  return *reinterpret_cast<const uint2*>(codes + 8 * (lane / 4));
}

// ---------------------------------------------------------------- streams of weights
//
// Each warp streams its own weights, with their scales and the rows of x that meet them,
// through its own ring of stages in shared memory, one scale group a stage.

constexpr int kMaxDepth = 4;

template <int kStage, int kDepth>
struct Ring {
  u8* stages;
  u32 barriers;
  int stage = 0;
  u32 parity = 0;

  DEVICE Ring(u8* stages, u64* barriers, int lane)
      : stages(stages), barriers(shared_address(barriers)) {
    // One arrival with the bytes of the weights, and one of each lane with its pieces.
    if (lane < kDepth) barrier_init(this->barriers + 8 * lane, 1 + 32);
    // Where the copy engine sees it.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }
  DEVICE u32 barrier(int stage) const { return barriers + 8 * stage; }
  DEVICE u8* at(int stage) const { return stages + stage * kStage; }
  // The current stage, with what was asked for; all lanes are done with the one before.
  DEVICE const u8* wait() const {
    barrier_wait(barrier(stage), parity);
    __syncwarp();
    return at(stage);
  }
  DEVICE int before() const { return stage == 0 ? kDepth - 1 : stage - 1; }
  DEVICE void advance() {
    if (++stage == kDepth) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A tile column of a matrix [N, K] in Marlin's layout.
template <int kBits>
struct TileColumn {
  const u8* weights;
  const u8* scales;
  u64 k_tile_bytes;
  int n;
  DEVICE TileColumn(const u8* matrix, const u8* scale_codes, int n, int tile)
      : weights(matrix + static_cast<u64>(tile) * kTileBytes<kBits>),
        scales(scale_codes + tile * kTileRows),
        k_tile_bytes(static_cast<u64>(n / kTileRows) * kTileBytes<kBits>),
        n(n) {}
  // By the elected lane.
  DEVICE void fetch(int group, u8* to, u32 barrier, u64 policy) const {
    const u8* from = weights + 2 * group * k_tile_bytes;
    const u32 at = shared_address(to);
    copy_block(at, from, kTileBytes<kBits>, barrier, policy);
    copy_block(at + kTileBytes<kBits>, from + k_tile_bytes, kTileBytes<kBits>, barrier,
               policy);
  }
  // By lanes 0 to 3.
  DEVICE void fetch_scales(int group, u8* to, int lane) const {
    copy_piece(shared_address(to) + 16 * lane,
               scales + static_cast<u64>(group) * n + 16 * lane);
  }
};

// In shared memory the scales follow the two k-tiles.
template <int kBits>
constexpr int kScalesAt = 2 * kTileBytes<kBits>;

template <int kBits, int kColumns>
DEVICE void multiply_stage(const u8* stage, int lane, const u32 (&x)[kColumns][4],
                           float (&sums)[kColumns][4][4]) {
  multiply_group<kBits, kColumns>(KTile<kBits>(stage, lane),
                                  KTile<kBits>(stage + kTileBytes<kBits>, lane),
                                  scales_of(stage + kScalesAt<kBits>, lane), x, sums);
}

// 8 rows of x, 32 k each, in shared memory. 16-byte pieces are swizzled, so that neither
// the copies to it nor ldmatrix meet bank conflicts.
constexpr int kRowsBytes = 8 * kGroup * 2;

DEVICE u32 place_of_piece(int row, int piece) {
  return row * 2 * kGroup + 16 * (piece ^ (row / 2 & 3));
}

// `row` is the lane's: row lane / 4 of 8, null for zeros.
DEVICE void fetch_rows(const u16* row, int k, u8* to, int lane) {
  copy_piece(shared_address(to) + place_of_piece(lane / 4, lane % 4),
             row ? row + k + 8 * (lane % 4) : nullptr);
}

DEVICE void load_rows(const u8* rows, int lane, u32 (&x)[4]) {
  load_matrices(shared_address(rows) + place_of_piece(lane % 8, lane / 8), x);
}

// ---------------------------------------------------------------- sums over warps
//
// Each warp of each block of a cluster has a part of `count` sums. The warps of a block
// add up through shared memory; each block owns count / size of the sums, and gets the
// others' parts of those.

// The lane's part of a product of 16 n x 8 rows, as [n][pitch].
DEVICE void keep_part(float* part, int pitch, int lane, const float (&sums)[4]) {
  float* to = part + lane / 4 * pitch + 2 * (lane % 4);
  *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
  *reinterpret_cast<float2*>(to + 8 * pitch) = make_float2(sums[2], sums[3]);
}

struct Exchange {
  float* space;  // [2][count]: of even and odd turns, [size][count / size]
  u32 barriers;
  int count;
  u32 rank, size;
  int turn = 0;

  DEVICE Exchange(float* space, u64* barriers, int count)
      : space(space),
        barriers(shared_address(barriers)),
        count(count),
        rank(cluster_rank()),
        size(cluster_size()) {
    if (size > 1) {
      if (threadIdx.x < 2) barrier_init(this->barriers + 8 * threadIdx.x, 1);
      cluster_arrive();
    }
  }
  DEVICE int owned() const { return count / size; }
  DEVICE u32 barrier() const { return barriers + 8 * (turn & 1); }
  DEVICE float* of_turn() const { return space + (turn & 1) * count; }
  // Before the first give(), by all threads: every block of the cluster has started.
  DEVICE void begin() const {
    if (size > 1) cluster_wait();
  }
  // Adds up `parts` [kWarps][some] for the sums `first`, `first` + 1, ..., and gives them
  // to their owners. The parts are there for all threads.
  DEVICE void give(const float* parts, int some, int first) const {
    float* to = of_turn() + rank * owned();
    for (int i = threadIdx.x; i < some; i += kThreads) {
      float sum = 0.f;
#pragma unroll
      for (int warp = 0; warp < kWarps; warp++) sum += parts[warp * some + i];
      const int value = first + i;
      if (size > 1)
        store_in_cluster(shared_address(to + value % owned()), barrier(), value / owned(),
                         sum);
      else
        to[value] = sum;
    }
  }
  // Until all parts of the owned sums are there. A block that is two turns ahead has
  // the sums of the turn between, so all of this block have read those of this one.
  DEVICE void wait() const {
    if (size > 1) {
      if (threadIdx.x == 0) barrier_expect(barrier(), 4 * count);
      barrier_wait(barrier(), turn >> 1 & 1);
    } else {
      __syncthreads();
    }
  }
  DEVICE float sum(int i) const {
    const float* from = of_turn() + i;
    float sum = 0.f;
    for (u32 other = 0; other < size; other++) sum += from[other * owned()];
    return sum;
  }
};

// ---------------------------------------------------------------- MXFP8 linear
//
// out [M, N] = x [M, K] weights^T, weights [N, K] e4m3 with a ue8m0 scale per 32 k.
// Grid: (cluster * c, ceil(M / (8 * kColumns))): each of c clusters goes through every
// c-th tile, and asks for the weights of the next while it sums. `n` is padded to 64,
// `n_out` is not.

struct LinearArgs {
  void* out;
  const u16* x;
  const u8* weights;
  const u8* scales;
  int rows, n, n_out, k, x_stride, out_stride;
};

template <int kColumns>
DEVICE void linear_mxfp8(const LinearArgs& args) {
  extern __shared__ __align__(128) u8 space[];
  constexpr int kPitch = 8 * kColumns, kCount = kTileRows * kPitch;
  constexpr int kStage = kGroupBytes<8> + kColumns * kRowsBytes;
  // What lets two blocks run on an SM where their registers do.
  constexpr int kDepth = kColumns == 2 ? 3 : 4;
  // Blocks of 16 n that are summed at a time, for the sake of shared memory.
  constexpr int kBlocks = kColumns == 1 ? 4 : 2;
  constexpr int kSome = kBlocks * 16 * kPitch;
  __shared__ u64 barriers[kWarps * kDepth], exchange_barriers[2];
  float* parts = reinterpret_cast<float*>(space) + 2 * kCount;
  u8* ring_space = reinterpret_cast<u8*>(parts + kWarps * kSome);
  Exchange exchange(reinterpret_cast<float*>(space), exchange_barriers, kCount);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int size = exchange.size, rank = exchange.rank;
  const int first_tile = blockIdx.x / size, clusters = gridDim.x / size;
  const int tiles = args.n / kTileRows;
  const int workers = size * kWarps, worker = rank * kWarps + warp;
  const int groups = args.k / kGroup;
  const int count = worker < groups ? (groups - worker + workers - 1) / workers : 0;
  Ring<kStage, kDepth> ring(ring_space + warp * kDepth * kStage, barriers + warp * kDepth,
                            lane);

  const u64 policy = evict_first();
  const int row0 = blockIdx.y * kPitch;
  const u16* x[kColumns];
#pragma unroll
  for (int column = 0; column < kColumns; column++) {
    const int row = row0 + 8 * column + lane / 4;
    x[column] = row < args.rows ? args.x + static_cast<u64>(row) * args.x_stride : nullptr;
  }
  // Where the fetching is: ahead of the products, also over the end of a tile.
  struct Ahead {
    int tile, i;
  };
  auto step = [&](Ahead& ahead) {
    if (++ahead.i == count) {
      ahead.i = 0;
      ahead.tile += clusters;
    }
  };
  auto fetch_weights = [&](const Ahead& ahead, int stage) {
    const TileColumn<8> column(args.weights, args.scales, args.n, ahead.tile);
    const int group = worker + ahead.i * workers;
    if (elected()) {
      barrier_expect(ring.barrier(stage), kScalesAt<8>);
      column.fetch(group, ring.at(stage), ring.barrier(stage), policy);
    }
    if (lane < 4) column.fetch_scales(group, ring.at(stage) + kScalesAt<8>, lane);
  };
  auto fetch_x = [&](const Ahead& ahead, int stage) {
#pragma unroll
    for (int column = 0; column < kColumns; column++)
      fetch_rows(x[column], (worker + ahead.i * workers) * kGroup,
                 ring.at(stage) + kGroupBytes<8> + column * kRowsBytes, lane);
    arrive_when_copied(ring.barrier(stage));
  };
  Ahead weights_ahead = {count ? first_tile : tiles, 0}, ahead = weights_ahead;
  for (int stage = 0; stage < kDepth - 1 && weights_ahead.tile < tiles; stage++) {
    fetch_weights(weights_ahead, stage);
    step(weights_ahead);
  }
  let_next_kernel_start();
  wait_for_inputs();
  for (int stage = 0; stage < kDepth - 1 && ahead.tile < tiles; stage++) {
    fetch_x(ahead, stage);
    step(ahead);
  }
  exchange.begin();

  for (int tile = first_tile; tile < tiles; tile += clusters, exchange.turn++) {
    float sums[kColumns][4][4] = {};
    for (int i = 0; i < count; i++) {
      const u8* stage = ring.wait();
      if (ahead.tile < tiles) {
        fetch_weights(ahead, ring.before());
        fetch_x(ahead, ring.before());
        step(ahead);
      }
      ring.advance();
      u32 now[kColumns][4];
#pragma unroll
      for (int column = 0; column < kColumns; column++)
        load_rows(stage + kGroupBytes<8> + column * kRowsBytes, lane, now[column]);
      multiply_stage<8, kColumns>(stage, lane, now, sums);
    }

#pragma unroll
    for (int first = 0; first < 4; first += kBlocks) {
      __syncthreads();  // the parts before these have been read
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int column = 0; column < kColumns; column++)
          keep_part(parts + warp * kSome + block * 16 * kPitch + 8 * column, kPitch, lane,
                    sums[column][first + block]);
      __syncthreads();
      exchange.give(parts, kSome, first * 16 * kPitch);
    }
    exchange.wait();

    const int owned_n = kTileRows / size;
    for (int i = threadIdx.x; i < exchange.owned() / 2; i += kThreads) {
      const int local_n = 2 * (i % (owned_n / 2)), column = i / (owned_n / 2);
      const int row = row0 + column, n = tile * kTileRows + rank * owned_n + local_n;
      if (row >= args.rows || n >= args.n_out) continue;
      const int at = local_n * kPitch + column;
      *reinterpret_cast<u32*>(static_cast<u16*>(args.out) +
                              static_cast<u64>(row) * args.out_stride + n) =
          pack_bf16x2(exchange.sum(at), exchange.sum(at + kPitch));
    }
  }
}

// ---------------------------------------------------------------- bf16 linear
//
// out [M, groups, N] = x [M, groups, K] weights^T, weights [groups, N, K] row-major;
// out in bf16 or float32. Grid: (cluster * N / 16, ceil(M / (8 * kColumns)), groups).

struct GroupedLinearArgs {
  void* out;
  const u16* x;
  const u16* weights;
  int rows, n, k, x_stride, x_group_stride, out_stride, out_group_stride, out_is_float;
};

template <int kColumns>
DEVICE void linear_bf16(const GroupedLinearArgs& args) {
  constexpr int kRows = 16, kPitch = 8 * kColumns, kCount = kRows * kPitch, kAhead = 4;
  __shared__ u64 exchange_barriers[2];
  __shared__ float sums_space[2 * kCount];
  __shared__ __align__(16) float parts[kWarps * kCount];
  Exchange exchange(sums_space, exchange_barriers, kCount);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int size = exchange.size, rank = exchange.rank;
  const int tile = blockIdx.x / size;
  const int workers = size * kWarps, worker = rank * kWarps + warp;
  const int chunks = args.k / 32;
  const int count = worker < chunks ? (chunks - worker + workers - 1) / workers : 0;
  const u16* weights = args.weights +
                       (static_cast<u64>(blockIdx.z) * args.n + tile * kRows + lane / 4) *
                           args.k +
                       8 * (lane % 4);

  uint4 top[2][kAhead], bottom[2][kAhead];
  auto fetch = [&](int first, uint4(&top)[kAhead], uint4(&bottom)[kAhead]) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i < count) {
        const u16* from = weights + (worker + (first + i) * workers) * 32;
        top[i] = load_weights(from);
        bottom[i] = load_weights(from + 8 * static_cast<u64>(args.k));
      } else {
        top[i] = bottom[i] = make_uint4(0, 0, 0, 0);
      }
    }
  };
  fetch(0, top[0], bottom[0]);
  fetch(kAhead, top[1], bottom[1]);
  let_next_kernel_start();
  wait_for_inputs();

  const int row0 = blockIdx.y * kPitch;
  const u16* x[kColumns];
#pragma unroll
  for (int column = 0; column < kColumns; column++) {
    const int row = row0 + 8 * column + lane / 4;
    x[column] = row < args.rows
                    ? args.x + static_cast<u64>(row) * args.x_stride +
                          static_cast<u64>(blockIdx.z) * args.x_group_stride +
                          8 * (lane % 4)
                    : nullptr;
  }
  float sums[kColumns][4] = {};
  auto multiply = [&](int first, const uint4(&top)[kAhead], const uint4(&bottom)[kAhead]) {
    uint4 columns[kAhead][kColumns];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
#pragma unroll
      for (int column = 0; column < kColumns; column++)
        columns[i][column] = x[column] && first + i < count
                                 ? load_vector(x[column] + (worker + (first + i) * workers) * 32)
                                 : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const u32 a[4] = {top[i].x, bottom[i].x, top[i].y, bottom[i].y};
      const u32 b[4] = {top[i].z, bottom[i].z, top[i].w, bottom[i].w};
#pragma unroll
      for (int column = 0; column < kColumns; column++) {
        mma(sums[column], a, columns[i][column].x, columns[i][column].y);
        mma(sums[column], b, columns[i][column].z, columns[i][column].w);
      }
    }
  };
  for (int i = 0; i < count; i += 2 * kAhead) {
    multiply(i, top[0], bottom[0]);
    fetch(i + 2 * kAhead, top[0], bottom[0]);
    if (i + kAhead < count) {
      multiply(i + kAhead, top[1], bottom[1]);
      fetch(i + 3 * kAhead, top[1], bottom[1]);
    }
  }

#pragma unroll
  for (int column = 0; column < kColumns; column++)
    keep_part(parts + warp * kCount + 8 * column, kPitch, lane, sums[column]);
  exchange.begin();
  __syncthreads();
  exchange.give(parts, kCount, 0);
  exchange.wait();
  for (int i = threadIdx.x; i < exchange.owned(); i += kThreads) {
    const int at = rank * exchange.owned() + i;
    const int n = tile * kRows + at / kPitch, row = row0 + at % kPitch;
    if (row >= args.rows) continue;
    const float sum = exchange.sum(i);
    const u64 to = static_cast<u64>(row) * args.out_stride +
                   static_cast<u64>(blockIdx.z) * args.out_group_stride + n;
    if (args.out_is_float)
      static_cast<float*>(args.out)[to] = sum;
    else
      static_cast<u16*>(args.out)[to] = static_cast<u16>(pack_bf16x2(sum, 0.f));
  }
}

// ---------------------------------------------------------------- experts
//
// A pair is one choice of one row: pair = row * topk + choice. Pairs of one expert are
// its members, in order; every eighth is a head, which serves itself and up to seven
// members after it with one visit of the expert's weights. The shared expert is visited
// once for every 8 rows; its members are pairs num_pairs + row.

struct Expert {
  const u8* weights;
  const u8* scales;
};

// Matrices [N, K] in Marlin's layout: of each routed expert e2m1, of the shared one e4m3.
struct ExpertMatrices {
  Expert routed, shared;  // shared.weights is null where there is none
  int n, k, shared_n, shared_k;
};

struct Routing {
  const int* expert_of;     // [pairs] global expert, negative where there is none
  const int* local_expert;  // [experts] its place here, negative where not; or null
  int num_pairs, topk, rows;
};

// The place of an expert here, or -1.
DEVICE int local_expert(const Routing& routing, int expert) {
  return expert < 0 || !routing.local_expert
             ? expert
             : static_cast<int>(load_word(routing.local_expert + expert));
}

DEVICE Expert routed_expert(const ExpertMatrices& matrices, int expert) {
  const u64 first = static_cast<u64>(expert) * matrices.n;
  return {matrices.routed.weights + first * (matrices.k / 2),
          matrices.routed.scales + first * (matrices.k / kGroup)};
}

// The visits of a step, in shared memory. `ids` and so on are of routed pairs.
struct Visits {
  int* ids;        // [pairs]
  int* experts;    // [visits] local
  u16* members;    // [visits, kMembers] pairs
  u8* num_members;
  int num_pairs, rows, topk;
  int routed = 0, shared;

  static constexpr int kPairBytes = 4 + 4 + 2 * kMembers + 4;
  DEVICE Visits(u8* space, const Routing& routing, bool has_shared)
      : num_pairs(routing.num_pairs),
        rows(routing.rows),
        topk(routing.topk),
        shared(has_shared ? (routing.rows + kMembers - 1) / kMembers : 0) {
    ids = reinterpret_cast<int*>(space);
    experts = ids + num_pairs;
    members = reinterpret_cast<u16*>(experts + num_pairs);
    num_members = reinterpret_cast<u8*>(members + kMembers * num_pairs);
  }
  // By all threads of the block, once the routing is there.
  DEVICE void find(const Routing& routing, int* counts) {
    if (num_pairs <= 32 && rows <= kMembers)
      find_few(routing, counts);
    else
      find_many(routing, counts);
  }
  // One warp sees all pairs at once. No row chooses an expert twice, so an expert has at
  // most kMembers of them.
  DEVICE void find_few(const Routing& routing, int* counts) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
      const int id =
          lane < num_pairs ? static_cast<int>(load_word(routing.expert_of + lane)) : -1;
      const int expert = local_expert(routing, id);
      u32 same = __match_any_sync(~0u, expert < 0 ? -1 - lane : expert);
      const u32 earlier = (1u << lane) - 1;
      const bool is_head = expert >= 0 && !(same & earlier);
      const u32 heads = __ballot_sync(~0u, is_head);
      if (is_head) {
        const int at = __popc(heads & earlier);
        experts[at] = expert;
        num_members[at] = static_cast<u8>(__popc(same));
        for (int index = 0; same; index++, same &= same - 1)
          members[at * kMembers + index] = static_cast<u16>(__ffs(same) - 1);
      }
      counts[0] = __popc(heads);
    }
    __syncthreads();
    routed = counts[0];
  }
  DEVICE void find_many(const Routing& routing, int* counts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads)
      ids[pair] = static_cast<int>(load_word(routing.expert_of + pair));
    __syncthreads();
    for (int first = 0; first < num_pairs; first += kThreads) {
      const int pair = first + threadIdx.x;
      const int id = pair < num_pairs ? ids[pair] : -1;
      const int expert = local_expert(routing, id);
      int before = 0;
      if (expert >= 0)
        for (int other = 0; other < pair - pair % topk; other++) before += ids[other] == id;
      const bool is_head = expert >= 0 && before % kMembers == 0;
      const u32 ballot = __ballot_sync(~0u, is_head);
      if (lane == 0) counts[warp] = __popc(ballot);
      __syncthreads();
      int at = routed + __popc(ballot & ((1u << lane) - 1));
      for (int other = 0; other < kWarps; other++) {
        if (other < warp) at += counts[other];
        routed += counts[other];
      }
      if (is_head) {
        int found = 0;
        for (int other = pair; other < num_pairs && found < kMembers; other++)
          if (ids[other] == id) members[at * kMembers + found++] = static_cast<u16>(other);
        experts[at] = expert;
        num_members[at] = static_cast<u8>(found);
      }
      __syncthreads();
    }
  }
  // Of a visit of the routed experts (4 bits) or the shared one (8): the pair that is its
  // member `index`, or -1, and the row of a pair.
  template <int kBits>
  DEVICE int pair_of(int visit, int index) const {
    if constexpr (kBits == 4)
      return index < num_members[visit] ? members[visit * kMembers + index] : -1;
    const int row = visit * kMembers + index;
    return row < rows ? num_pairs + row : -1;
  }
  template <int kBits>
  DEVICE int row_of(int pair) const {
    return kBits == 4 ? pair / topk : pair - num_pairs;
  }
  template <int kBits>
  DEVICE Expert expert_of(const ExpertMatrices& matrices, int visit) const {
    return kBits == 4 ? routed_expert(matrices, experts[visit]) : matrices.shared;
  }
};

// act [pairs + rows, I] = SwiGLU of x w13^T, w13 [2 * I_padded, K], gate first. The
// shared expert is not padded: its up projection may begin in the middle of a tile.
// An item is a visit and a tile of it. Grid: (cluster * c): each of c clusters goes
// through every c-th item, and asks for the weights of the next while it sums.
struct GateUpArgs {
  ExpertMatrices w13;
  Routing routing;
  u16* act;
  const u16* x;
  int intermediate, x_stride;
  float limit;
};

// A stage holds gate and up, each with its scales, where up is split 64 more scales, and
// the rows of x.
template <int kBits>
constexpr int kGateUpWeights = 2 * kGroupBytes<kBits> + (kBits == 8 ? kTileRows : 0);
// Two stages of the shared expert, three of a routed one.
constexpr int kGateUpRing = 2 * (kGateUpWeights<8> + kRowsBytes);

// The items `first`, `first` + `step`, ..., before `end`, of one kind.
template <int kBits, class Inputs>
DEVICE void gate_up_items(const GateUpArgs& args, const Visits& visits, u8* space,
                          u64* barriers, float* parts, Exchange& exchange, int first,
                          int step, int end, Inputs inputs) {
  constexpr int kWeights = kGateUpWeights<kBits>, kStage = kWeights + kRowsBytes;
  constexpr int kDepth = kGateUpRing / kStage;
  constexpr int kSome = kTileRows * kMembers;
  const ExpertMatrices& w13 = args.w13;
  const int n = kBits == 4 ? w13.n : w13.shared_n;
  const int up_row = kBits == 4 ? w13.n / 2 : args.intermediate;
  const bool up_is_split = kBits == 8 && up_row % kTileRows;
  const int tiles = (args.intermediate + kTileRows - 1) / kTileRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int size = exchange.size, rank = exchange.rank;
  const int workers = size * kWarps, worker = rank * kWarps + warp;
  const int groups = (kBits == 4 ? w13.k : w13.shared_k) / kGroup;
  const int count = worker < groups ? (groups - worker + workers - 1) / workers : 0;
  const u64 policy = evict_first();
  Ring<kStage, kDepth> ring(space, barriers, lane);

  // Where the fetching is: ahead of the products, also over the end of an item.
  struct Ahead {
    int item, i;
    const u8 *weights, *scales;
    const u16* x;
    int tile;
  };
  auto enter = [&](Ahead& ahead) {
    ahead.i = 0;
    if (ahead.item >= end) return;
    const int visit = ahead.item / tiles;
    const Expert expert = visits.expert_of<kBits>(w13, visit);
    const int pair = visits.pair_of<kBits>(visit, lane / 4);
    ahead.weights = expert.weights;
    ahead.scales = expert.scales;
    ahead.tile = ahead.item % tiles;
    ahead.x = pair < 0 ? nullptr
                       : args.x + static_cast<u64>(visits.row_of<kBits>(pair)) * args.x_stride;
  };
  auto advance = [&](Ahead& ahead) {
    if (++ahead.i == count) {
      ahead.item += step;
      enter(ahead);
    }
  };
  auto fetch_weights = [&](const Ahead& ahead, int stage) {
    const TileColumn<kBits> gate(ahead.weights, ahead.scales, n, ahead.tile);
    const TileColumn<kBits> up(ahead.weights, ahead.scales, n,
                               up_row / kTileRows + ahead.tile);
    const int group = worker + ahead.i * workers;
    u8* to = ring.at(stage);
    u8* up_to = to + kGroupBytes<kBits>;
    if (elected()) {
      barrier_expect(ring.barrier(stage), (up_is_split ? 1 : 2) * kScalesAt<kBits>);
      gate.fetch(group, to, ring.barrier(stage), policy);
      if (!up_is_split) up.fetch(group, up_to, ring.barrier(stage), policy);
    }
    if (lane < 8)
      (lane < 4 ? gate : up)
          .fetch_scales(group, to + kScalesAt<kBits> + lane / 4 * kGroupBytes<kBits>, lane % 4);
    if (up_is_split) {
      // The last 32 n of one tile and the first of the next: odd and even pieces. The
      // last tile has no next one, and no use for it.
      const TileColumn<kBits> up_end(
          ahead.weights, ahead.scales, n,
          min(up_row / kTileRows + ahead.tile + 1, n / kTileRows - 1));
      const u64 first = 2 * group * up.k_tile_bytes + 32 * lane;
#pragma unroll
      for (int k_tile = 0; k_tile < 2; k_tile++) {
        const u64 from = first + k_tile * up.k_tile_bytes;
        const u32 place = shared_address(up_to) + k_tile * kTileBytes<8> + 32 * lane;
        copy_piece(place, up.weights + from + 16);
        copy_piece(place + 16, up_end.weights + from);
      }
      if (lane < 4)
        up_end.fetch_scales(group, up_to + kScalesAt<kBits> + kTileRows, lane);
    }
  };
  auto fetch_x = [&](const Ahead& ahead, int stage) {
    fetch_rows(ahead.x, (worker + ahead.i * workers) * kGroup, ring.at(stage) + kWeights,
               lane);
    arrive_when_copied(ring.barrier(stage));
  };

  Ahead weights_ahead = {count ? first : end};
  enter(weights_ahead);
  Ahead ahead = weights_ahead;
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; stage++) {
    if (weights_ahead.item < end) {
      fetch_weights(weights_ahead, stage);
      advance(weights_ahead);
    }
  }
  inputs();
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; stage++) {
    if (ahead.item < end) {
      fetch_x(ahead, stage);
      advance(ahead);
    }
  }
  for (int item = first; item < end; item += step, exchange.turn++) {
    float sums[2][1][4][4] = {};  // gate and up
    for (int i = 0; i < count; i++) {
      const u8* stage = ring.wait();
      if (ahead.item < end) {
        fetch_weights(ahead, ring.before());
        fetch_x(ahead, ring.before());
        advance(ahead);
      }
      ring.advance();
      u32 x[1][4];
      load_rows(stage + kWeights, lane, x[0]);
      multiply_stage<kBits, 1>(stage, lane, x, sums[0]);
      stage += kGroupBytes<kBits>;
      uint2 codes = scales_of(stage + kScalesAt<kBits>, lane);
      if (up_is_split)
        codes = make_uint2(codes.y, scales_of(stage + kScalesAt<kBits> + kTileRows, lane).x);
      multiply_group<kBits, 1>(KTile<kBits>(stage, lane),
                               KTile<kBits>(stage + kTileBytes<kBits>, lane), codes, x,
                               sums[1]);
    }
    // Sum 16 * n + member is the gate of n, 16 * n + 8 + member its up projection. Half of
    // the n at a time, for the sake of shared memory.
#pragma unroll
    for (int half = 0; half < 2; half++) {
      __syncthreads();  // the parts before these have been read
#pragma unroll
      for (int block = 0; block < 2; block++)
#pragma unroll
        for (int up = 0; up < 2; up++)
          keep_part(parts + warp * kSome + block * 16 * 16 + 8 * up, 16, lane,
                    sums[up][0][2 * half + block]);
      __syncthreads();
      exchange.give(parts, kSome, half * kSome);
    }
    exchange.wait();
    const int visit = item / tiles, owned_n = kTileRows / size;
    for (int i = threadIdx.x; i < owned_n * kMembers; i += kThreads) {
      const int local_n = i % owned_n, member = i / owned_n;
      const int n = item % tiles * kTileRows + rank * owned_n + local_n;
      const int pair = visits.pair_of<kBits>(visit, member);
      if (pair < 0 || n >= args.intermediate) continue;
      float gate = exchange.sum(16 * local_n + member);
      float up = exchange.sum(16 * local_n + 8 + member);
      // Comparisons, not fminf, so that NaN stays.
      gate = gate > args.limit ? args.limit : gate;
      up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
      const float act = gate / (1.f + __expf(-gate)) * up;
      args.act[static_cast<u64>(pair) * args.intermediate + n] =
          static_cast<u16>(pack_bf16x2(act, 0.f));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    experts_gate_up(const __grid_constant__ GateUpArgs args) {
  extern __shared__ __align__(128) u8 space[];
  constexpr int kCount = 2 * kTileRows * kMembers;
  __shared__ u64 barriers[2][kWarps * kMaxDepth], exchange_barriers[2];
  __shared__ int counts[kWarps];
  u8* ring_space = space;
  float* sums_space = reinterpret_cast<float*>(space + kWarps * kGateUpRing);
  float* parts = sums_space + 2 * kCount;
  Exchange exchange(sums_space, exchange_barriers, kCount);
  Visits visits(reinterpret_cast<u8*>(parts + kWarps * kCount / 2), args.routing,
                args.w13.shared.weights);
  const int warp = threadIdx.x / 32;
  const int tiles = (args.intermediate + kTileRows - 1) / kTileRows;
  const int clusters = gridDim.x / exchange.size, cluster = blockIdx.x / exchange.size;
  u8* ring = ring_space + warp * kGateUpRing;

  const int shared_items = visits.shared * tiles;
  gate_up_items<8>(args, visits, ring, barriers[0] + warp * kMaxDepth, parts, exchange,
                   cluster, clusters, shared_items, [&] {
                     wait_for_inputs();
                     // After the wait, so that what starts now may read the routing.
                     let_next_kernel_start();
                     exchange.begin();
                     visits.find(args.routing, counts);
                   });
  // The routed items go on round the clusters where the shared expert's ended.
  gate_up_items<4>(args, visits, ring, barriers[1] + warp * kMaxDepth, parts, exchange,
                   (cluster + clusters - shared_items % clusters) % clusters, clusters,
                   visits.routed * tiles, [] {});
}

// ---------------------------------------------------------------- experts' down
//
// A unit is one visit's product of a tile column with a chunk of K. Units go round the
// warps of all blocks; parts [chunks, pairs + rows, N] float32 are added up by
// experts_sum.

struct DownArgs {
  ExpertMatrices w2;
  Routing routing;
  float* parts;
  const u16* act;
  int intermediate, chunks;
};

// A stage holds some scale groups: weights and scales of each, then the rows of each.
template <int kBits>
constexpr int kDownGroups = kBits == 4 ? 3 : 1;
template <int kBits>
constexpr int kDownStage = kDownGroups<kBits> * (kGroupBytes<kBits> + kRowsBytes);
constexpr int kDownRing = 2 * kDownStage<4>;

// The units `first`, `first` + `step`, ..., before `end`, of one kind.
template <int kBits>
DEVICE void down_units(const DownArgs& args, const Visits& visits, u8* space, u64* barriers,
                       int first, int step, int end, bool& inputs_are_there) {
  constexpr int kGroups = kDownGroups<kBits>, kStage = kDownStage<kBits>;
  constexpr int kDepth = kDownRing / kStage, kRowsAt = kGroups * kGroupBytes<kBits>;
  const ExpertMatrices& w2 = args.w2;
  const int n = kBits == 4 ? w2.n : w2.shared_n, tiles = n / kTileRows;
  const int groups = args.intermediate / kGroup, lane = threadIdx.x % 32;
  const u64 policy = evict_first();
  Ring<kStage, kDepth> ring(space, barriers, lane);

  auto first_group = [&](int chunk) { return groups * chunk / args.chunks; };
  struct Ahead {
    int unit, group, end_group;
    const u8 *weights, *scales;
    const u16* act;
  };
  // Tiles change first, so that neighbours read the same members.
  auto enter = [&](Ahead& ahead) {
    if (ahead.unit >= end) return;
    const int tile = ahead.unit % tiles, chunk = ahead.unit / tiles % args.chunks;
    const int visit = ahead.unit / tiles / args.chunks;
    const Expert expert = visits.expert_of<kBits>(w2, visit);
    const TileColumn<kBits> column(expert.weights, expert.scales, n, tile);
    const int pair = visits.pair_of<kBits>(visit, lane / 4);
    ahead.weights = column.weights;
    ahead.scales = column.scales;
    ahead.act =
        pair < 0 ? nullptr : args.act + static_cast<u64>(pair) * args.intermediate;
    ahead.group = first_group(chunk);
    ahead.end_group = first_group(chunk + 1);
  };
  auto advance = [&](Ahead& ahead) {
    ahead.group += kGroups;
    if (ahead.group >= ahead.end_group) {
      ahead.unit += step;
      enter(ahead);
    }
  };
  auto fetch_weights = [&](const Ahead& ahead, int stage) {
    const TileColumn<kBits> column(ahead.weights, ahead.scales, n, 0);
    const int some = min(kGroups, ahead.end_group - ahead.group);
    u8* to = ring.at(stage);
    if (elected()) {
      barrier_expect(ring.barrier(stage), some * kScalesAt<kBits>);
#pragma unroll
      for (int i = 0; i < kGroups; i++)
        if (i < some)
          column.fetch(ahead.group + i, to + i * kGroupBytes<kBits>, ring.barrier(stage),
                       policy);
    }
    if (lane < 4 * some)
      column.fetch_scales(ahead.group + lane / 4,
                          to + lane / 4 * kGroupBytes<kBits> + kScalesAt<kBits>, lane % 4);
  };
  auto fetch_act = [&](const Ahead& ahead, int stage) {
    const int some = min(kGroups, ahead.end_group - ahead.group);
#pragma unroll
    for (int i = 0; i < kGroups; i++)
      if (i < some)
        fetch_rows(ahead.act, (ahead.group + i) * kGroup,
                   ring.at(stage) + kRowsAt + i * kRowsBytes, lane);
    arrive_when_copied(ring.barrier(stage));
  };

  Ahead weights_ahead = {first};
  enter(weights_ahead);
  Ahead ahead = weights_ahead;
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; stage++) {
    if (weights_ahead.unit < end) {
      fetch_weights(weights_ahead, stage);
      advance(weights_ahead);
    }
  }
  if (!inputs_are_there) {
    wait_for_inputs();
    inputs_are_there = true;
  }
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; stage++) {
    if (ahead.unit < end) {
      fetch_act(ahead, stage);
      advance(ahead);
    }
  }
  for (int unit = first; unit < end; unit += step) {
    const int tile = unit % tiles, chunk = unit / tiles % args.chunks;
    const int visit = unit / tiles / args.chunks;
    const int end_group = first_group(chunk + 1);
    float sums[1][4][4] = {};
    for (int group = first_group(chunk); group < end_group; group += kGroups) {
      const u8* stage = ring.wait();
      if (ahead.unit < end) {
        fetch_weights(ahead, ring.before());
        fetch_act(ahead, ring.before());
        advance(ahead);
      }
      ring.advance();
#pragma unroll
      for (int i = 0; i < kGroups; i++) {
        if (group + i >= end_group) break;
        u32 act[1][4];
        load_rows(stage + kRowsAt + i * kRowsBytes, lane, act[0]);
        multiply_stage<kBits, 1>(stage + i * kGroupBytes<kBits>, lane, act, sums);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int pair = visits.pair_of<kBits>(visit, 2 * (lane % 4) + j);
      if (pair < 0) continue;
      float* to = args.parts +
                  (static_cast<u64>(chunk) * (visits.num_pairs + visits.rows) + pair) * n +
                  tile * kTileRows + lane / 4;
#pragma unroll
      for (int block = 0; block < 4; block++) {
        to[16 * block] = sums[0][block][j];
        to[16 * block + 8] = sums[0][block][2 + j];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    experts_down(const __grid_constant__ DownArgs args) {
  extern __shared__ __align__(128) u8 space[];
  __shared__ u64 barriers[2][kWarps * kMaxDepth];
  __shared__ int counts[kWarps];
  Visits visits(space + kWarps * kDownRing, args.routing, args.w2.shared.weights);
  const int warp = threadIdx.x / 32;
  u8* ring = space + warp * kDownRing;
  let_next_kernel_start();

  // The routing is there: the kernel before this one let it start after waiting for it.
  visits.find(args.routing, counts);
  const int columns = args.w2.n / kTileRows * args.chunks;
  const int workers = gridDim.x * kWarps, worker = warp * gridDim.x + blockIdx.x;
  bool inputs_are_there = false;
  down_units<8>(args, visits, ring, barriers[0] + warp * kMaxDepth, worker, workers,
                visits.shared * columns, inputs_are_there);
  // The routed units go on round the warps where the shared expert's ended.
  down_units<4>(args, visits, ring, barriers[1] + warp * kMaxDepth,
                (worker + workers - visits.shared * columns % workers) % workers, workers,
                visits.routed * columns, inputs_are_there);
}

// out [M, N] bf16 = scale times the weighted sum of each row's parts, of its choices that
// have an expert here, plus the shared expert's. Grid: (ceil(N / (4 * threads)), M).
struct SumArgs {
  Routing routing;
  u16* out;
  const float* parts;
  const float* pair_weights;  // [pairs]
  int n, chunks, has_shared;
  float scale;
};

constexpr int kSumThreads = 64;
constexpr int kMaxChoices = 8;

extern "C" __global__ void __launch_bounds__(kSumThreads)
    experts_sum(const __grid_constant__ SumArgs args) {
  const Routing& routing = args.routing;
  const int row = blockIdx.y, n = 4 * (blockIdx.x * kSumThreads + threadIdx.x);
  let_next_kernel_start();
  wait_for_inputs();
  // Asked for together, so that they take the time of one.
  int experts[kMaxChoices];
  float weights[kMaxChoices];
#pragma unroll
  for (int choice = 0; choice < kMaxChoices; choice++) {
    const bool is_there = choice < routing.topk;
    const int pair = row * routing.topk + choice;
    experts[choice] =
        is_there ? static_cast<int>(load_word(routing.expert_of + pair)) : -1;
    weights[choice] = is_there ? args.scale * load_float(args.pair_weights + pair) : 0.f;
  }
#pragma unroll
  for (int choice = 0; choice < kMaxChoices; choice++)
    experts[choice] = local_expert(routing, experts[choice]);
  if (n >= args.n) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  auto add = [&](uint4 part, float weight) {
    sum.x += weight * __uint_as_float(part.x);
    sum.y += weight * __uint_as_float(part.y);
    sum.z += weight * __uint_as_float(part.z);
    sum.w += weight * __uint_as_float(part.w);
  };
  for (int chunk = 0; chunk < args.chunks; chunk++) {
    const float* parts =
        args.parts +
        static_cast<u64>(chunk) * (routing.num_pairs + routing.rows) * args.n + n;
    uint4 part[kMaxChoices + 1];
#pragma unroll
    for (int choice = 0; choice < kMaxChoices; choice++)
      if (experts[choice] >= 0)
        part[choice] =
            load_vector(parts + static_cast<u64>(row * routing.topk + choice) * args.n);
    if (args.has_shared)
      part[kMaxChoices] =
          load_vector(parts + static_cast<u64>(routing.num_pairs + row) * args.n);
#pragma unroll
    for (int choice = 0; choice < kMaxChoices; choice++)
      if (experts[choice] >= 0) add(part[choice], weights[choice]);
    if (args.has_shared) add(part[kMaxChoices], 1.f);
  }
  *reinterpret_cast<uint2*>(args.out + static_cast<u64>(row) * args.n + n) =
      make_uint2(pack_bf16x2(sum.x, sum.y), pack_bf16x2(sum.z, sum.w));
}

// ---------------------------------------------------------------- entry points

#define LINEAR_MXFP8(columns, blocks)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks)                   \
      linear_mxfp8_##columns(const __grid_constant__ LinearArgs args) {            \
    linear_mxfp8<columns>(args);                                                   \
  }
#define LINEAR_BF16(columns)                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                           \
      linear_bf16_##columns(const __grid_constant__ GroupedLinearArgs args) {      \
    linear_bf16<columns>(args);                                                    \
  }

LINEAR_MXFP8(1, 2)
LINEAR_MXFP8(2, 2)
LINEAR_MXFP8(4, 1)
LINEAR_BF16(1)
LINEAR_BF16(2)
LINEAR_BF16(4)
