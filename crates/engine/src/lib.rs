//! All decisions: which rows run, what is kept, when a reply ends. Knows no device, dtype or HTTP type.
//!
//! A round is five steps: `plan` decides (pure), the model computes, `verify` judges (pure), `commit` writes (and nothing
//! else does), `State::check` asserts what must always hold. A reply is a pure function of its request; how rounds are
//! cut, who shares them and how many drafts they hold changes only how long it takes.

pub mod channel;
pub mod clock;
pub mod commit;
pub mod copy;
pub mod depth;
pub mod disk;
pub mod drafting;
pub mod engine;
pub mod forcing;
pub mod limits;
pub mod model;
pub mod plan;
pub mod prefix_cache;
pub mod prefixes;
pub mod request;
pub mod round;
pub mod sequence;
pub mod slots;
pub mod state;
pub mod stats;
pub mod testing;
pub mod verify;

pub use channel::{Batch, TokenRow};
pub use clock::{Clock, Time, VirtualClock, WallClock};
pub use engine::{Engine, EngineHandle, Lifecycle, Reply, spawn, spawn_with_disk};
pub use forcing::{Forcing, Reasoning};
pub use limits::{DraftPolicy, EngineLimits, LimitsError};
pub use request::{
    CacheReason, CacheSource, CacheUse, DraftCounts, DraftSource, FinishReason, Finished, Position, Priority,
    ReplyStats, Request, RequestId, Sampling, StopReason, SubmitError,
};
pub use stats::{EngineStats, ROUND_ROW_BOUNDS};
