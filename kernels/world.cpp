// RWKV World's tokenizer: from the left, always the longest word of the vocabulary that fits.
//
// The vocabulary is a trie in a double array (Aoe, 1989): node s has a child by byte c if check[base[s] + c] == s, and
// that slot is the child. rrd_world_new takes the words one behind the other, where each begins (n + 1 offsets) and
// their ids; every single byte must be a word, so that there is always one that fits. rrd_world_encode writes at most
// one id a byte to `out` and returns how many; it changes nothing of the trie, so threads may share one.
// Plain reference: rrd.train.world.World.words.

#include <algorithm>
#include <cstdint>
#include <new>
#include <numeric>
#include <vector>

namespace {

struct Trie {
  std::vector<int32_t> base, check, id;

  void grow(size_t slots) {
    if (base.size() >= slots) return;
    slots = std::max(slots, base.size() * 2);
    base.resize(slots, 0);
    check.resize(slots, -1);
    id.resize(slots, -1);
  }
};

struct Words {
  const uint8_t *bytes;
  const int64_t *offsets;
  const int32_t *ids;
  std::vector<int64_t> order;  // sorted by bytes: the words below a node stand together

  int64_t length(int64_t w) const { return offsets[w + 1] - offsets[w]; }
  uint8_t byte(int64_t w, int64_t at) const { return bytes[offsets[w] + at]; }
};

// Gives node `s`, which stands for the first `depth` bytes of the words order[first..last), its id and children.
void place(Trie &trie, const Words &words, int64_t first, int64_t last, int64_t depth, int32_t s, int32_t &free) {
  if (words.length(words.order[first]) == depth) trie.id[s] = words.ids[words.order[first++]];
  std::vector<std::pair<uint8_t, int64_t>> children;  // byte, and where its words begin
  for (int64_t i = first; i < last; i++) {
    const uint8_t c = words.byte(words.order[i], depth);
    if (children.empty() || children.back().first != c) children.push_back({c, i});
  }
  if (children.empty()) return;
  for (;; free++) {  // nodes with one child are nearly all: the first free slot does for them
    trie.grow(free + 512);
    if (trie.check[free] < 0) break;
  }
  int32_t b = std::max(1, free - children[0].first);
  for (;; b++) {
    trie.grow(b + 512);
    if (std::all_of(children.begin(), children.end(), [&](auto &c) { return trie.check[b + c.first] < 0; })) break;
  }
  trie.base[s] = b;
  for (auto &c : children) trie.check[b + c.first] = s;
  for (size_t k = 0; k < children.size(); k++) {
    const int64_t end = k + 1 < children.size() ? children[k + 1].second : last;
    place(trie, words, children[k].second, end, depth + 1, b + children[k].first, free);
  }
}

}  // namespace

extern "C" {

void *rrd_world_new(const uint8_t *bytes, const int64_t *offsets, const int32_t *ids, int64_t n) try {
  Words words{bytes, offsets, ids, std::vector<int64_t>(n)};
  std::iota(words.order.begin(), words.order.end(), 0);
  std::sort(words.order.begin(), words.order.end(), [&](int64_t a, int64_t b) {
    return std::lexicographical_compare(bytes + offsets[a], bytes + offsets[a + 1], bytes + offsets[b],
                                        bytes + offsets[b + 1]);
  });
  auto *trie = new Trie;
  trie->grow(1024);
  trie->check[0] = 0;  // the root's own slot
  int32_t free = 1;
  place(*trie, words, 0, n, 0, 0, free);
  trie->grow(trie->base.size() + 256);  // base + byte never leaves the arrays
  return trie;
} catch (const std::bad_alloc &) {
  return nullptr;
}

int64_t rrd_world_encode(const void *made, const uint8_t *text, int64_t n, int32_t *out) {
  const Trie &trie = *static_cast<const Trie *>(made);
  const int32_t *base = trie.base.data(), *check = trie.check.data(), *id = trie.id.data();
  int64_t count = 0;
  for (int64_t at = 0; at < n;) {
    int64_t end = at + 1;
    int32_t found = 0;
    for (int64_t i = at, s = 0; i < n; i++) {
      const int64_t child = base[s] + text[i];
      if (base[s] == 0 || check[child] != s) break;
      s = child;
      if (id[s] >= 0) found = id[s], end = i + 1;
    }
    out[count++] = found;
    at = end;
  }
  return count;
}
}
