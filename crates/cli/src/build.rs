//! What this build is.

use tf_model::Family;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit it was built from, or `unknown`.
pub const COMMIT: &str = env!("TF_BUILD_COMMIT");
/// Digest of the sources that decide a bit of a kept state.
pub const SOURCES: &str = env!("TF_BUILD_SOURCES");
/// Backends that this build can run on.
pub const BACKENDS: &[&str] = match (cfg!(feature = "cuda"), cfg!(target_os = "macos")) {
    (false, false) => &["cpu"],
    (true, false) => &["cpu", "cuda"],
    (false, true) => &["cpu", "metal"],
    (true, true) => &["cpu", "cuda", "metal"],
};

/// One line for `--version`.
pub fn text() -> String {
    let families: Vec<_> = Family::ALL.iter().map(|family| family.model_type()).collect();
    format!("tensorfold {VERSION} ({COMMIT}), backends: {}, families: {}", BACKENDS.join(" "), families.join(" "))
}
