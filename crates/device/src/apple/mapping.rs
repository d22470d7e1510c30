//! Which host bytes a GPU that shares the host's memory reads where they are. A buffer over existing memory covers whole pages,
//! so bytes of a mapped file are reached through the pages around them.

/// Below this a buffer of its own costs more than a copy.
const BYTES_LEAST: usize = 64 << 10;

/// What a device asks of memory that it uses without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Whether host and device share their memory.
    pub unified: bool,
    pub page_bytes: usize,
    /// Of one buffer.
    pub buffer_bytes_max: usize,
}

/// Whole pages around some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Bytes before the first one that belong to its page.
    pub before: usize,
    /// All of them, a multiple of a page.
    pub bytes: usize,
}

/// Why bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// The device has memory of its own.
    Apart,
    /// There are too few.
    Small,
    /// Their first element lies across its natural address.
    Misaligned,
    /// Their pages are more than one buffer may have.
    Large,
}

impl Terms {
    /// Decides for `bytes` bytes at `address` whose elements have `element_bytes` bytes.
    ///
    /// # Errors
    /// Why they have to be copied.
    pub fn pages(&self, address: usize, bytes: usize, element_bytes: usize) -> Result<Pages, Copied> {
        if !self.unified {
            return Err(Copied::Apart);
        }
        if bytes < BYTES_LEAST {
            return Err(Copied::Small);
        }
        if !address.is_multiple_of(element_bytes) {
            return Err(Copied::Misaligned);
        }
        let before = address % self.page_bytes;
        let whole = before.checked_add(bytes).and_then(|bytes| bytes.checked_next_multiple_of(self.page_bytes));
        match whole {
            Some(bytes) if bytes <= self.buffer_bytes_max => Ok(Pages { before, bytes }),
            _ => Err(Copied::Large),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 16 << 10;
    const TERMS: Terms = Terms { unified: true, page_bytes: PAGE, buffer_bytes_max: 1 << 30 };

    #[test]
    fn bytes_are_reached_through_whole_pages_around_them() {
        let large = 100 << 10;
        for (address, bytes, element, expected) in [
            (7 * PAGE, 4 * PAGE, 1, Ok(Pages { before: 0, bytes: 4 * PAGE })),
            (7 * PAGE, 4 * PAGE + 1, 1, Ok(Pages { before: 0, bytes: 5 * PAGE })),
            (7 * PAGE + 6, 4 * PAGE, 2, Ok(Pages { before: 6, bytes: 5 * PAGE })),
            (8 * PAGE - 2, large, 2, Ok(Pages { before: PAGE - 2, bytes: 8 * PAGE })),
            (7 * PAGE + 3, large, 2, Err(Copied::Misaligned)),
            (7 * PAGE + 2, large, 4, Err(Copied::Misaligned)),
            (7 * PAGE + 3, large, 1, Ok(Pages { before: 3, bytes: 7 * PAGE })),
            (7 * PAGE, BYTES_LEAST - 1, 1, Err(Copied::Small)),
            (0, 1 << 30, 1, Ok(Pages { before: 0, bytes: 1 << 30 })),
            (1, 1 << 30, 1, Err(Copied::Large)),
            (5, usize::MAX - 4, 1, Err(Copied::Large)),
        ] {
            assert_eq!(TERMS.pages(address, bytes, element), expected, "{bytes} at {address}");
        }
        let apart = Terms { unified: false, ..TERMS };
        assert_eq!(apart.pages(0, 1 << 20, 1), Err(Copied::Apart));
    }
}
