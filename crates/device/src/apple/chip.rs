//! Which Apple GPUs the kernels run on, and what is known of each. Sources: Apple's Metal feature set tables (families
//! Apple 7 to 10) and its published figures of chips, none of them measured here.

/// The first family with SIMD groups of 32, 32 KiB of threadgroup memory and bfloat: M1.
const FAMILY_NEEDED: u32 = 7;
/// The first macOS whose compiler takes Metal 3.1.
const MACOS_NEEDED: (u32, u32) = (14, 0);
/// The first macOS with residency sets.
const MACOS_RESIDENCY: (u32, u32) = (15, 0);

/// What a system says of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// As the vendor names it: `Apple M3 Ultra`.
    pub name: String,
    /// The newest Apple family that it supports; `None` for GPUs of other makers.
    pub family: Option<u32>,
    /// Whether host and GPU share their memory.
    pub unified: bool,
    /// Major and minor version of macOS.
    pub macos: (u32, u32),
}

/// A GPU that the kernels run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chip {
    pub family: u32,
    /// GPU cores: of the largest form of a known chip, of the smallest chip otherwise. Spreads work, decides no bit.
    pub cores: u32,
    pub has_residency_sets: bool,
}

/// Why a GPU is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("this Mac shows no Metal device: use --backend cpu")]
    None,
    #[error("{name} is no Apple GPU, and the kernels are for Apple silicon (M1 or later): use --backend cpu")]
    Foreign { name: String },
    #[error(
        "{name} is of GPU family Apple {family}, the kernels need Apple {FAMILY_NEEDED} (M1) or later: use --backend cpu"
    )]
    Old { name: String, family: u32 },
    #[error("{name} has memory of its own, and the kernels expect memory that host and GPU share: use --backend cpu")]
    Apart { name: String },
    #[error(
        "macOS is {}.{}, the kernels need {}.{} or later, whose compiler takes Metal 3.1: update it, or use --backend cpu",
        found.0, found.1, MACOS_NEEDED.0, MACOS_NEEDED.1
    )]
    System { found: (u32, u32) },
}

impl Chip {
    /// Judges one GPU. A family newer than those known here is taken: what it must compute is asked of it before use.
    ///
    /// # Errors
    /// [`Refusal`] with what was found and what is needed.
    pub fn of(found: &Found) -> Result<Chip, Refusal> {
        let name = || found.name.clone();
        let family = found.family.ok_or_else(|| Refusal::Foreign { name: name() })?;
        if family < FAMILY_NEEDED {
            return Err(Refusal::Old { name: name(), family });
        }
        if !found.unified {
            return Err(Refusal::Apart { name: name() });
        }
        if found.macos < MACOS_NEEDED {
            return Err(Refusal::System { found: found.macos });
        }
        let cores = published(&found.name).map_or(CORES_LEAST, |figures| figures.cores);
        Ok(Chip { family, cores, has_residency_sets: found.macos >= MACOS_RESIDENCY })
    }

    /// The first GPU that is taken, and its place in the list.
    ///
    /// # Errors
    /// The first refusal, or [`Refusal::None`].
    pub fn choose(found: &[Found]) -> Result<(usize, Chip), Refusal> {
        let mut first = None;
        for (index, gpu) in found.iter().enumerate() {
            match Chip::of(gpu) {
                Ok(chip) => return Ok((index, chip)),
                Err(refusal) => first = first.or(Some(refusal)),
            }
        }
        Err(first.unwrap_or(Refusal::None))
    }

    /// What bits and compiled code belong to: `apple9` and the like.
    pub fn target(&self) -> String {
        format!("apple{}", self.family)
    }
}

/// Major and minor of a version's text, 0 where it has none: `15.1.2`.
pub fn version(text: &str) -> (u32, u32) {
    let mut parts = text.trim().split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Cores of the smallest chip.
const CORES_LEAST: u32 = 7;

/// Published figures of a chip's largest form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// As Metal names the device.
    pub name: &'static str,
    pub family: u32,
    pub cores: u32,
    /// Memory bandwidth, in 10^9 bytes a second.
    pub bandwidth: u32,
    /// The most memory that it is sold with, in GiB.
    pub memory: u32,
}

const fn figures(name: &'static str, family: u32, cores: u32, bandwidth: u32, memory: u32) -> Figures {
    Figures { name, family, cores, bandwidth, memory }
}

/// The chips M1 to M5 by Metal's name.
pub const PUBLISHED: &[Figures] = &[
    figures("Apple M1", 7, 8, 68, 16),
    figures("Apple M1 Pro", 7, 16, 200, 32),
    figures("Apple M1 Max", 7, 32, 400, 64),
    figures("Apple M1 Ultra", 7, 64, 800, 128),
    figures("Apple M2", 8, 10, 100, 24),
    figures("Apple M2 Pro", 8, 19, 200, 32),
    figures("Apple M2 Max", 8, 38, 400, 96),
    figures("Apple M2 Ultra", 8, 76, 800, 192),
    figures("Apple M3", 9, 10, 100, 24),
    figures("Apple M3 Pro", 9, 18, 150, 36),
    figures("Apple M3 Max", 9, 40, 400, 128),
    figures("Apple M3 Ultra", 9, 80, 819, 512),
    figures("Apple M4", 9, 10, 120, 32),
    figures("Apple M4 Pro", 9, 20, 273, 64),
    figures("Apple M4 Max", 9, 40, 546, 128),
    figures("Apple M5", 10, 10, 153, 32),
    figures("Apple M5 Pro", 10, 20, 307, 64),
    figures("Apple M5 Max", 10, 40, 614, 128),
];

/// The published figures of the chip that Metal names so.
pub fn published(name: &str) -> Option<&'static Figures> {
    PUBLISHED.iter().find(|figures| figures.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, family: Option<u32>, unified: bool, macos: (u32, u32)) -> Found {
        Found { name: name.into(), family, unified, macos }
    }

    #[test]
    fn every_published_chip_is_taken_with_its_cores_and_family() {
        for figures in PUBLISHED {
            let chip = Chip::of(&found(figures.name, Some(figures.family), true, (14, 0))).expect(figures.name);
            assert_eq!((chip.cores, chip.family), (figures.cores, figures.family), "{}", figures.name);
            assert_eq!(chip.target(), format!("apple{}", figures.family));
        }
        let names: std::collections::BTreeSet<_> = PUBLISHED.iter().map(|figures| figures.name).collect();
        assert_eq!(names.len(), PUBLISHED.len());
    }

    #[test]
    fn a_chip_that_nobody_knows_yet_is_taken_with_the_least_cores() {
        let chip = Chip::of(&found("Apple M9", Some(14), true, (27, 1))).expect("taken");
        assert_eq!(chip, Chip { family: 14, cores: CORES_LEAST, has_residency_sets: true });
        assert!(!Chip::of(&found("Apple M1", Some(7), true, (14, 6))).expect("taken").has_residency_sets);
    }

    #[test]
    fn what_the_kernels_cannot_run_on_is_refused_with_what_was_found() {
        let cases = [
            (found("AMD Radeon Pro 5500M", None, false, (15, 0)), "AMD Radeon Pro 5500M is no Apple GPU"),
            (
                found("Apple A13", Some(6), true, (15, 0)),
                "Apple A13 is of GPU family Apple 6, the kernels need Apple 7 (M1)",
            ),
            (found("Apple X", Some(9), false, (15, 0)), "Apple X has memory of its own"),
            (found("Apple M2", Some(8), true, (13, 6)), "macOS is 13.6, the kernels need 14.0 or later"),
        ];
        for (gpu, expected) in cases {
            let text = Chip::of(&gpu).expect_err("refused").to_string();
            assert!(text.starts_with(expected) && text.ends_with("use --backend cpu"), "{text}");
        }
    }

    #[test]
    fn versions_are_read_as_far_as_they_go() {
        for (text, expected) in
            [("15.1.2", (15, 1)), ("14", (14, 0)), ("26.0\n", (26, 0)), ("", (0, 0)), ("x.y", (0, 0))]
        {
            assert_eq!(version(text), expected, "{text:?}");
        }
        assert!(Chip::of(&found("Apple M3", Some(9), true, version(""))).is_err(), "an unknown system is refused");
    }

    #[test]
    fn the_first_usable_gpu_of_several_is_chosen() {
        let radeon = found("AMD Radeon", None, false, (15, 0));
        let m3 = found("Apple M3", Some(9), true, (15, 0));
        assert_eq!(Chip::choose(&[radeon.clone(), m3.clone()]).map(|(index, _)| index), Ok(1));
        assert_eq!(Chip::choose(&[m3, radeon.clone()]).map(|(index, _)| index), Ok(0));
        assert_eq!(Chip::choose(&[radeon]), Err(Refusal::Foreign { name: "AMD Radeon".into() }));
        assert_eq!(Chip::choose(&[]), Err(Refusal::None));
    }
}
