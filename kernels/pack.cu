// Scattered tensors into one staging buffer, so that one copy brings a checkpoint to the host. The reference is pack in
// rrd/ops/reference.py.
//
// Shapes   pieces [count, 3] int64: where the piece's bytes are, counted from base (base null: addresses); where they
//          go in out; how many. out [size] uint8, aligned to 16 bytes.
// Writes   Exactly the pieces' bytes of out; what lies between them stays. Pieces must not overlap in out.
// Exact    Bytes are copied: 16 at a time where place and number allow it, else 4, else one.
// Grid     (blocks, count), count <= 65535: the blocks of a column share one piece.

#ifndef __CUDACC__
#include "host.h"
#endif

template <class Word>
__device__ __forceinline__ void copy(const unsigned char* from, unsigned char* to, long long bytes) {
  const long long words = bytes / (long long)sizeof(Word);
  for (long long i = (long long)blockIdx.x * 256 + threadIdx.x; i < words; i += (long long)gridDim.x * 256)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
}

extern "C" __global__ void __launch_bounds__(256) rrd_pack(
    const unsigned char* base, const long long* pieces, int count, unsigned char* out) {
  const long long* piece = pieces + 3 * (long long)blockIdx.y;
  const unsigned char* from = reinterpret_cast<const unsigned char*>((long long)base + piece[0]);
  unsigned char* to = out + piece[1];
  const long long odd = (long long)from | (long long)to | piece[2];
  if (odd % 16 == 0) copy<int4>(from, to, piece[2]);
  else if (odd % 4 == 0) copy<int>(from, to, piece[2]);
  else copy<unsigned char>(from, to, piece[2]);
}
