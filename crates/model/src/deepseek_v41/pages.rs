//! Hands out cache pages by number and counts who holds each. Knows no bytes: a page is a fixed count of positions.
//!
//! A page belongs to every slot and snapshot that holds a [`PageRef`]; the last one to let go returns it. A slot writes
//! only into pages that it alone holds, so what a snapshot holds never changes.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Positions of one page.
pub const PAGE_POSITIONS: u32 = 128;

#[derive(Debug)]
struct Shared {
    holders: Vec<AtomicU32>,
    free: Mutex<Vec<u32>>,
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        // The list is a plain stack of numbers; a panic elsewhere cannot leave it half written.
        self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// All pages of a model.
#[derive(Debug)]
pub struct PagePool {
    shared: Arc<Shared>,
}

impl PagePool {
    pub fn new(page_count: u32) -> Self {
        let holders = (0..page_count).map(|_| AtomicU32::new(0)).collect();
        // Low numbers first, so that memory is touched from the start.
        let free = Mutex::new((0..page_count).rev().collect());
        PagePool { shared: Arc::new(Shared { holders, free }) }
    }

    pub fn page_count(&self) -> u32 {
        self.shared.holders.len() as u32
    }

    pub fn free_count(&self) -> u32 {
        self.shared.free().len() as u32
    }

    /// A page that nobody holds, or `None` when all are held.
    pub fn take(&self) -> Option<PageRef> {
        let index = self.shared.free().pop()?;
        let before = self.shared.holders[index as usize].swap(1, Ordering::AcqRel);
        assert_eq!(before, 0, "a free page had a holder");
        Some(PageRef { shared: Arc::clone(&self.shared), index })
    }
}

/// A share in a page.
#[derive(Debug)]
pub struct PageRef {
    shared: Arc<Shared>,
    index: u32,
}

impl PageRef {
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Whether nobody else holds this page. Others cannot begin to hold it except through this share.
    pub fn is_unique(&self) -> bool {
        self.shared.holders[self.index as usize].load(Ordering::Acquire) == 1
    }
}

impl Clone for PageRef {
    fn clone(&self) -> Self {
        self.shared.holders[self.index as usize].fetch_add(1, Ordering::AcqRel);
        PageRef { shared: Arc::clone(&self.shared), index: self.index }
    }
}

impl Drop for PageRef {
    fn drop(&mut self) {
        if self.shared.holders[self.index as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.free().push(self.index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_returns_when_its_last_holder_lets_go() {
        let pool = PagePool::new(2);
        let first = pool.take().expect("two pages are free");
        let second = pool.take().expect("one page is free");
        assert!(pool.take().is_none());
        let share = first.clone();
        assert!(!first.is_unique());
        drop(first);
        assert!(share.is_unique());
        assert_eq!(pool.free_count(), 0);
        drop(share);
        drop(second);
        assert_eq!(pool.free_count(), pool.page_count());
    }

    #[test]
    fn a_share_may_be_dropped_on_another_thread() {
        let pool = PagePool::new(1);
        let share = pool.take().expect("a page is free");
        std::thread::spawn(move || drop(share)).join().expect("dropping a share does not panic");
        assert_eq!(pool.free_count(), 1);
    }
}
