// Winograd's transformed numbers over a ring as limbs (Config::limb_split): the transforms write a matrix of bytes for each place
// and limb, its plane, with rows along the channels as gemm/limb_planes.cuh has them, and `run` copies bytes. Of 16 bytes of a
// number of Z/2^72 that is the 9 that count, of 8 of Z/2^40 5; and no product turns them.
//
// A thread has one channel. Four neighbouring lanes have four channels of a row, whose bytes of a limb are one word of its
// plane: of every four places each of them gathers the words of one, turns their bytes and stores them.
#pragma once

namespace cukiln {
namespace conv {
namespace winograd {

#if defined(CUKILN_DEVICE)

enum { quad = 4 };  // lanes, channels, places and bytes of a word that are turned at a time

// Of four neighbouring lanes `lane` gets words[lane] of each, in their order.
__device__ __forceinline__ void gather_words(unsigned (&words)[quad], int lane) {
#pragma unroll
  for (int distance = quad / 2; distance > 0; distance /= 2) {
    const bool high = lane & distance;
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      if (i & distance) continue;
      const unsigned received = shuffle_xor(high ? words[i] : words[i | distance], distance);
      words[i] = high ? received : words[i];
      words[i | distance] = high ? words[i | distance] : received;
    }
  }
}

// Writes a channel of a row of the matrices of all places. `index`: the channel's among those of all rows; `per_place`: bytes of
// a plane. All lanes of a warp call it; what lies behind the last row is not stored.
template <int limbs, int edge, class V>
__device__ __forceinline__ void store_planes(unsigned char* planes, int64_t index, int64_t per_place, const V (&values)[edge][edge]) {
  static_assert(edge * edge % quad == 0, "each lane of four stores one of four places");
  const int lane = static_cast<int>(threadIdx.x) % quad;
  const bool exists = in_bounds(index, per_place);  // bounds: number of planes
  unsigned char* const first = planes + index - lane;
#pragma unroll
  for (int begin = 0; begin < edge * edge; begin += quad) {
#pragma unroll
    for (int low = 0; low < limbs; low += quad) {
      unsigned words[quad];
#pragma unroll
      for (int i = 0; i < quad; ++i)
        words[i] = static_cast<unsigned>(values[(begin + i) / edge][(begin + i) % edge].value >> 8 * low);
      gather_words(words, lane);
      transpose_bytes(words);
#pragma unroll
      for (int i = 0; i < quad && low + i < limbs; ++i) {
        unsigned char* const plane = first + ((begin + lane) * limbs + low + i) * per_place;
        if (exists) store_global<1>(reinterpret_cast<unsigned*>(plane), Vector<unsigned, 1>{{words[i]}});
      }
    }
  }
}

#endif  // CUKILN_DEVICE

}  // namespace winograd
}  // namespace conv
}  // namespace cukiln
