//! What an encoder's argument table holds, so that a launch sets only what differs from the launch before it.

/// What one index of the table holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Of the buffer; unique as long as the table isn't cleared.
    pub buffer: u64,
    pub first: usize,
}

/// What has to be set for an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is there already.
    None,
    /// The same buffer from another byte on.
    First,
    Buffer,
}

/// The buffers that an encoder has bound.
#[derive(Debug, Default)]
pub struct ArgumentTable {
    held: Vec<Option<Held>>,
}

impl ArgumentTable {
    /// Forgets all: a new encoder has nothing bound.
    pub fn clear(&mut self) {
        self.held.clear();
    }

    /// Notes that `index` is to hold `wanted`, and says what has to be set for it.
    pub fn hold(&mut self, index: usize, wanted: Held) -> Change {
        let before = self.slot(index).replace(wanted);
        match before {
            Some(before) if before == wanted => Change::None,
            Some(before) if before.buffer == wanted.buffer => Change::First,
            _ => Change::Buffer,
        }
    }

    /// Notes that `index` holds bytes, which no later launch may take for a buffer.
    pub fn hold_bytes(&mut self, index: usize) {
        *self.slot(index) = None;
    }

    /// Forgets a buffer that is given back: its number may name another one later.
    pub fn forget(&mut self, buffer: u64) {
        self.held
            .iter_mut()
            .filter(|held| held.is_some_and(|held| held.buffer == buffer))
            .for_each(|held| *held = None);
    }

    fn slot(&mut self, index: usize) -> &mut Option<Held> {
        if self.held.len() <= index {
            self.held.resize(index + 1, None);
        }
        &mut self.held[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_set() {
        let mut table = ArgumentTable::default();
        let held = |buffer, first| Held { buffer, first };
        for (index, wanted, change) in [
            (0, held(7, 0), Change::Buffer),
            (0, held(7, 0), Change::None),
            (0, held(7, 64), Change::First),
            (3, held(7, 64), Change::Buffer),
            (0, held(8, 64), Change::Buffer),
        ] {
            assert_eq!(table.hold(index, wanted), change, "{index} {wanted:?}");
        }
        table.hold_bytes(0);
        assert_eq!(table.hold(0, held(8, 64)), Change::Buffer, "bytes stood in its place");
        table.forget(8);
        assert_eq!(table.hold(0, held(8, 64)), Change::Buffer, "it is another buffer now");
        assert_eq!(table.hold(3, held(7, 64)), Change::None, "others stay");
        table.clear();
        assert_eq!(table.hold(3, held(7, 64)), Change::Buffer, "a new encoder has nothing");
    }
}
