//! Ids that never repeat. They carry no meaning and enter nothing that is computed.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static KEYS: OnceLock<RandomState> = OnceLock::new();
static COUNT: AtomicU64 = AtomicU64::new(0);

fn random() -> u64 {
    let mut hasher = KEYS.get_or_init(RandomState::new).build_hasher();
    hasher.write_u64(COUNT.fetch_add(1, Ordering::Relaxed));
    hasher.finish()
}

/// `prefix` and `digits` hexadecimal digits, at most 32.
pub fn id(prefix: &str, digits: usize) -> String {
    let hexadecimal = format!("{:016x}{:016x}", random(), random());
    format!("{prefix}{}", &hexadecimal[..digits.min(32)])
}

/// A number that nobody has seen before.
pub fn number() -> u64 {
    random()
}
