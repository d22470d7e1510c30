//! Which rows a launch computes, and where a position's entries lie in the caches. Host data, no arithmetic on values.
//!
//! Rows of one window are consecutive positions of one sequence; windows follow each other in the order of the rows.

/// One row of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RowInfo {
    /// The sequence's seat in the caches.
    pub slot: u32,
    /// Absolute position.
    pub position: u32,
    /// Index of the row's window.
    pub window: u32,
}

/// Consecutive rows of one sequence: a piece of a prompt, or a pending token and its drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct WindowInfo {
    pub slot: u32,
    /// Position of the first row. Keys before it come from the ring, keys from it on from the launch's own rows.
    pub start: u32,
    /// Index of the first row in the launch.
    pub first_row: u32,
    pub row_count: u32,
}

/// One compressed entry that a launch completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct EntryInfo {
    pub slot: u32,
    /// Index of the entry in its sequence: it covers positions `[entry * ratio, (entry + 1) * ratio)`.
    pub entry: u32,
    /// The row that holds the entry's last position.
    pub row: u32,
}

/// Where the entries of every slot lie: pages of `entries_per_page` entries.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// `[slots, pages_per_slot]`: physical page of each logical page.
    pub table: &'a [u32],
    pub pages_per_slot: usize,
    pub entries_per_page: usize,
}

impl Pages<'_> {
    /// Physical page that holds `entry` of `slot`.
    ///
    /// # Panics
    /// When the table has no such page: the caller reserved too few.
    #[inline]
    pub fn page(&self, slot: u32, entry: usize) -> usize {
        let logical = entry / self.entries_per_page;
        assert!(logical < self.pages_per_slot, "entry {entry} is beyond the {} pages of a slot", self.pages_per_slot);
        self.table[slot as usize * self.pages_per_slot + logical] as usize
    }

    /// Index of `entry` of `slot` in a cache seen as `[pages * entries_per_page]` entries.
    #[inline]
    pub fn index(&self, slot: u32, entry: usize) -> usize {
        self.page(slot, entry) * self.entries_per_page + entry % self.entries_per_page
    }
}

/// Entries that a query at `position` may see: the groups whose last position is not after it.
#[inline]
pub fn visible(position: u32, ratio: u32) -> usize {
    ((position + 1) / ratio) as usize
}

/// Writes into `entries` those that the rows complete, in row order: all of them at ratio 1, one for each odd position at
/// ratio 2. The list keeps its memory.
pub fn completed_entries(rows: &[RowInfo], ratio: u32, entries: &mut Vec<EntryInfo>) {
    entries.clear();
    for (row, info) in rows.iter().enumerate() {
        if (info.position + 1).is_multiple_of(ratio) {
            entries.push(EntryInfo { slot: info.slot, entry: info.position / ratio, row: row as u32 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_completed_by_its_last_position_and_visible_from_there_on() {
        for ratio in [1, 2] {
            let rows: Vec<RowInfo> = (3..10).map(|position| RowInfo { slot: 1, position, window: 0 }).collect();
            let mut entries = vec![EntryInfo { slot: 9, entry: 9, row: 9 }];
            completed_entries(&rows, ratio, &mut entries);
            assert_eq!(entries.len(), if ratio == 1 { 7 } else { 4 });
            for EntryInfo { slot, entry, row } in entries {
                let position = rows[row as usize].position;
                assert_eq!(slot, 1);
                assert_eq!(position, entry * ratio + ratio - 1);
                assert_eq!(visible(position, ratio), entry as usize + 1);
                assert_eq!(visible(position - 1, ratio), entry as usize);
            }
        }
    }

    #[test]
    fn pages_are_looked_up_by_slot_and_entry() {
        let table = [4, 7, 2, 0];
        let pages = Pages { table: &table, pages_per_slot: 2, entries_per_page: 64 };
        let cases = [(0, 0, 4 * 64), (0, 63, 4 * 64 + 63), (0, 64, 7 * 64), (1, 5, 2 * 64 + 5), (1, 127, 63)];
        for (slot, entry, index) in cases {
            assert_eq!(pages.index(slot, entry), index, "slot {slot} entry {entry}");
        }
    }

    #[test]
    #[should_panic(expected = "beyond the 1 pages")]
    fn an_entry_without_a_page_is_a_bug() {
        Pages { table: &[0, 1], pages_per_slot: 1, entries_per_page: 64 }.index(0, 64);
    }
}
