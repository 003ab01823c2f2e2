// What stands in the tables of a call, where the caller's memory can be read: in a library of target cpu. On a GPU tables are read
// on the device alone.
#pragma once

namespace cukiln {
namespace binding {

// Numbers of operands, -1 where a kernel takes none: where queries and keys of sequences begin, pages, keys of last pages; the
// tensor of keys, or of their pages. `page_size`: keys of a page, 0 where keys lie one behind the other.
struct Tables {
  int qo_indptr, kv_indptr, kv_indices, kv_last_page_len, keys, page_size;
};

inline int table_entry(const TensorView& table, int64_t index) { return static_cast<const int*>(table.data)[index]; }

// A table of where sequences begin and the last one ends, of a tensor with `end` of what it counts.
inline bool check_begins(const char* name, const TensorView& table, int64_t end, const char* counted, Complaint complaint) {
  const int64_t last = table.shape[0] - 1;
  if (table_entry(table, 0) != 0) CUKILN_REFUSE(complaint, "ValueError: %s begins with %d; 0 is allowed", name, table_entry(table, 0));
  for (int64_t i = 1; i <= last; ++i)
    if (table_entry(table, i) < table_entry(table, i - 1))
      CUKILN_REFUSE(complaint, "ValueError: %s[%lld] is %d, but %d stands before it; entries that do not decrease are allowed", name,
                    static_cast<long long>(i), table_entry(table, i), table_entry(table, i - 1));
  if (table_entry(table, last) > end)
    CUKILN_REFUSE(complaint, "ValueError: %s ends with %d, but there are %lld %s; at most so many are allowed", name, table_entry(table, last),
                  static_cast<long long>(end), counted);
  return true;
}

inline bool check_pages(const Tables& of, const TensorView* tensors, Complaint complaint) {
  const TensorView &begins = tensors[of.kv_indptr], &indices = tensors[of.kv_indices];
  const int64_t batch = begins.shape[0] - 1, pages = tensors[of.keys].shape[0];
  for (int64_t i = 0; i < table_entry(begins, batch); ++i)
    if (table_entry(indices, i) < 0 || table_entry(indices, i) >= pages)
      CUKILN_REFUSE(complaint, "ValueError: kv_indices[%lld] is %d; pages from 0 to %lld are there", static_cast<long long>(i),
                    table_entry(indices, i), static_cast<long long>(pages - 1));
  if (of.kv_last_page_len < 0) return true;
  for (int64_t i = 0; i < batch; ++i) {
    const int length = table_entry(tensors[of.kv_last_page_len], i);
    const bool has_pages = table_entry(begins, i + 1) > table_entry(begins, i);
    if (has_pages && (length < 1 || length > of.page_size))
      CUKILN_REFUSE(complaint, "ValueError: kv_last_page_len[%lld] is %d; 1 to %d keys of a page are allowed", static_cast<long long>(i),
                    length, of.page_size);
  }
  return true;
}

// Of tensors that were found to have the right types and shapes.
inline bool check_tables(const Tables& of, const TensorView* tensors, Complaint complaint) {
  const bool paged = of.page_size > 0;
  const int64_t keys = tensors[paged ? of.kv_indices : of.keys].shape[0];
  if (of.qo_indptr >= 0 && !check_begins("qo_indptr", tensors[of.qo_indptr], tensors[0].shape[0], "queries", complaint)) return false;
  if (!check_begins("kv_indptr", tensors[of.kv_indptr], keys, paged ? "entries of kv_indices" : "keys", complaint)) return false;
  return !paged || check_pages(of, tensors, complaint);
}

}  // namespace binding
}  // namespace cukiln
