//! Planted faults: each breaks one law on purpose, so that the tests can show that they would notice.

/// Which rule is broken. Shipping code only ever uses [`Fault::None`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Ring records that a rejected row left behind are not overwritten.
    StaleRing,
    /// The same of the draft head's rings.
    StaleDrafts,
    /// Token ids that a rejected row left behind stay in the n-gram history.
    StaleTokens,
    /// Raw pair rows are not kept from round to round.
    PairRowLost,
    /// The halo misses its first row in every layer.
    HaloShort,
    /// Hidden values depend on how many rows share the round.
    RowCount,
    /// Hidden values depend on how many threads there are.
    Threads,
    /// A slot writes into pages that a snapshot holds.
    SharedPage,
    /// A snapshot forgets the oldest row of each window.
    SnapshotShort,
    /// Drafting overwrites a record of the target's window.
    DraftWrites,
    /// A pass of the draft head reads the rings of its first slot for all of them.
    DraftSlot,
}
