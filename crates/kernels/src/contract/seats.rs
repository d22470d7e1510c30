//! How picked rows sit in a launch: consecutive positions of one sequence share a window, every window has a slot of its own.

use super::Pick;
use crate::rows::{RowInfo, WindowInfo};

/// The rows and windows of a launch, and whose they are.
pub struct Seats {
    pub rows: Vec<RowInfo>,
    pub windows: Vec<WindowInfo>,
    /// `[windows]`: the world's sequence, `None` for a poison row.
    pub sequences: Vec<Option<usize>>,
    /// Slots that the caches must have.
    pub slots: usize,
}

/// Position of a poison row.
const POISON_POSITION: u32 = 5;

impl Seats {
    /// `place` gives each of the world's rows its sequence and position. Slots follow the windows in an order that changes
    /// with the launch.
    pub fn of(picks: &[Pick], place: impl Fn(usize) -> (usize, u32)) -> Seats {
        Seats::windows_of(picks, place, true)
    }

    /// As [`Seats::of`]; without `merge` every row is a window of its own.
    pub fn windows_of(picks: &[Pick], place: impl Fn(usize) -> (usize, u32), merge: bool) -> Seats {
        let mut seats = Seats { rows: Vec::new(), windows: Vec::new(), sequences: Vec::new(), slots: 0 };
        for (index, pick) in picks.iter().enumerate() {
            let (sequence, position) = match pick.row() {
                Some(row) => (Some(place(row).0), place(row).1),
                None => (None, POISON_POSITION),
            };
            let continues = merge && sequence.is_some() && seats.sequences.last() == Some(&sequence) && {
                let window = seats.windows.last().expect("there is a window for every sequence");
                window.start + window.row_count == position
            };
            if continues {
                seats.windows.last_mut().expect("it continues one").row_count += 1;
            } else {
                seats.windows.push(WindowInfo { slot: 0, start: position, first_row: index as u32, row_count: 1 });
                seats.sequences.push(sequence);
            }
            let window = seats.windows.len() as u32 - 1;
            seats.rows.push(RowInfo { slot: 0, position, window });
        }
        seats.slots = seats.windows.len() + 1;
        for (index, window) in seats.windows.iter_mut().enumerate() {
            window.slot = ((seats.slots * 2 - 1 - index + picks.len()) % seats.slots) as u32;
        }
        for row in &mut seats.rows {
            row.slot = seats.windows[row.window as usize].slot;
        }
        seats
    }

    /// The window in each slot.
    pub fn window_in(&self, slot: usize) -> Option<(usize, WindowInfo)> {
        self.windows.iter().position(|window| window.slot as usize == slot).map(|index| (index, self.windows[index]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_rows_share_a_window_and_every_window_has_its_slot() {
        let picks = [Pick::Row(0), Pick::Row(1), Pick::Poison(0), Pick::Row(2), Pick::Row(1), Pick::Row(7)];
        let seats = Seats::of(&picks, |row| (row / 4, 10 + row as u32 % 4));
        let shape: Vec<_> = seats.windows.iter().map(|w| (w.start, w.first_row, w.row_count)).collect();
        assert_eq!(shape, [(10, 0, 2), (5, 2, 1), (12, 3, 1), (11, 4, 1), (13, 5, 1)]);
        assert_eq!(seats.sequences, [Some(0), None, Some(0), Some(0), Some(1)]);
        let mut slots: Vec<u32> = seats.windows.iter().map(|window| window.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), seats.windows.len());
        assert!(slots.iter().all(|slot| (*slot as usize) < seats.slots));
        assert!(seats.rows.iter().all(|row| seats.windows[row.window as usize].slot == row.slot));
    }
}
