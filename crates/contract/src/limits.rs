//! What each chip takes, as a table, and what a launch asks for. A launch is checked against every chip of its backend
//! without that chip being here.

use tf_kernels::contract::{Contract, Limit};
use tf_numerics::lanes::Level;

/// An Apple chip.
#[derive(Clone, Copy, Debug)]
pub struct AppleChip {
    pub name: &'static str,
    /// Threads of a threadgroup whose kernel uses few registers.
    pub threads_max: u32,
    pub threadgroup_bytes_max: u32,
    pub simd_width: u32,
    /// Buffer arguments of one kernel.
    pub buffers_max: u32,
    /// Bytes of arguments set without a buffer.
    pub argument_bytes_max: u32,
    /// Matrix units that the shading language reaches as tensors.
    pub tensor_units: bool,
    /// Newest language version, times ten.
    pub language: u32,
}

const fn apple(name: &'static str, tensor_units: bool) -> AppleChip {
    AppleChip {
        name,
        threads_max: 1024,
        threadgroup_bytes_max: 32 << 10,
        simd_width: 32,
        buffers_max: 31,
        argument_bytes_max: 4096,
        tensor_units,
        language: 40,
    }
}

pub const APPLE: &[AppleChip] =
    &[apple("M1", false), apple("M2", false), apple("M3", false), apple("M4", false), apple("M5", true)];

/// An NVIDIA architecture.
#[derive(Clone, Copy, Debug)]
pub struct NvidiaChip {
    pub name: &'static str,
    /// Threads of a block.
    pub threads_max: u32,
    /// Registers of a thread, and of all threads of a block together.
    pub thread_registers_max: u32,
    pub block_registers_max: u32,
    /// Shared memory of a block: declared, and asked for at launch.
    pub static_shared_bytes_max: u32,
    pub shared_bytes_max: u32,
}

const fn nvidia(name: &'static str, shared_kib: u32) -> NvidiaChip {
    NvidiaChip {
        name,
        threads_max: 1024,
        thread_registers_max: 255,
        block_registers_max: 65536,
        static_shared_bytes_max: 48 << 10,
        shared_bytes_max: shared_kib << 10,
    }
}

pub const NVIDIA: &[NvidiaChip] = &[
    nvidia("sm_80", 163),
    nvidia("sm_86", 99),
    nvidia("sm_89", 99),
    nvidia("sm_90", 227),
    nvidia("sm_100", 227),
    nvidia("sm_103", 227),
    nvidia("sm_120", 99),
    nvidia("sm_121", 99),
];

/// What one launch of a Metal kernel asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct MetalLaunch {
    pub threads: u32,
    /// What the compiled pipeline takes after its registers; 0 where it was not compiled.
    pub pipeline_threads_max: u32,
    pub threadgroup_bytes: u32,
    pub simd_width: u32,
    pub buffers: u32,
    pub argument_bytes: u32,
    pub needs_tensor_units: bool,
    pub language: u32,
}

/// What one launch of a CUDA kernel asks for; registers, static shared memory and spills as the compiler reports them.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaLaunch {
    pub threads: u32,
    pub thread_registers: u32,
    pub static_shared_bytes: u32,
    pub dynamic_shared_bytes: u32,
    pub spill_bytes: u32,
}

fn over(problems: &mut Vec<String>, chip: &str, what: &str, found: u32, most: u32) {
    if found > most {
        problems.push(format!("{chip}: {what} {found} is above {most}"));
    }
}

/// What any chip of the table refuses about a launch of `entry`.
pub fn apple_problems(entry: &str, launch: &MetalLaunch) -> Vec<String> {
    let of_chips = APPLE.iter().flat_map(|chip| metal_problems(chip, launch));
    of_chips.map(|text| format!("{entry}: {text}")).collect()
}

/// What a chip refuses about a launch.
pub fn metal_problems(chip: &AppleChip, launch: &MetalLaunch) -> Vec<String> {
    let mut problems = Vec::new();
    let threads_max = match launch.pipeline_threads_max {
        0 => chip.threads_max,
        after_registers => chip.threads_max.min(after_registers),
    };
    over(&mut problems, chip.name, "threads of a threadgroup", launch.threads, threads_max);
    over(&mut problems, chip.name, "threadgroup bytes", launch.threadgroup_bytes, chip.threadgroup_bytes_max);
    over(&mut problems, chip.name, "buffers", launch.buffers, chip.buffers_max);
    over(&mut problems, chip.name, "argument bytes", launch.argument_bytes, chip.argument_bytes_max);
    over(&mut problems, chip.name, "language version (times ten)", launch.language, chip.language);
    if launch.simd_width != chip.simd_width {
        problems
            .push(format!("{}: a SIMD group has {} threads, not {}", chip.name, chip.simd_width, launch.simd_width));
    }
    if launch.needs_tensor_units && !chip.tensor_units {
        problems.push(format!("{}: no tensor units", chip.name));
    }
    problems
}

/// What an architecture refuses about a launch. A spill is a problem too: it is slow and was not planned.
pub fn cuda_problems(chip: &NvidiaChip, launch: &CudaLaunch) -> Vec<String> {
    let mut problems = Vec::new();
    let shared = launch.static_shared_bytes + launch.dynamic_shared_bytes;
    over(&mut problems, chip.name, "threads of a block", launch.threads, chip.threads_max);
    over(&mut problems, chip.name, "registers of a thread", launch.thread_registers, chip.thread_registers_max);
    over(
        &mut problems,
        chip.name,
        "registers of a block",
        launch.threads * launch.thread_registers,
        chip.block_registers_max,
    );
    over(&mut problems, chip.name, "static shared bytes", launch.static_shared_bytes, chip.static_shared_bytes_max);
    over(&mut problems, chip.name, "shared bytes", shared, chip.shared_bytes_max);
    over(&mut problems, chip.name, "spilled bytes", launch.spill_bytes, 0);
    problems
}

/// Instruction sets of the CPU bodies, and whether this machine has them.
pub fn cpu_levels() -> Vec<(&'static str, bool)> {
    let available: Vec<String> = Level::available().iter().map(ToString::to_string).collect();
    let has = |name: &str| available.iter().any(|level| level == name);
    ["scalar", "avx2", "avx512", "neon"].map(|name| (name, has(name))).to_vec()
}

/// Launches at a limit must be taken, those beyond it refused.
pub fn launcher_problems(contract: &Contract) -> Vec<String> {
    let mut problems = Vec::new();
    for Limit { what, most, accepts, beyond } in contract.limits {
        if !accepts(*most) {
            problems.push(format!("{}: {what} {most} is refused, and must be taken", contract.name));
        }
        if accepts(*beyond) {
            problems.push(format!("{}: {what} {beyond} is taken, and must be refused", contract.name));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chip_takes_its_limit_and_refuses_one_more() {
        for chip in NVIDIA {
            let fits = CudaLaunch {
                threads: 256,
                thread_registers: 255,
                static_shared_bytes: chip.static_shared_bytes_max,
                dynamic_shared_bytes: chip.shared_bytes_max - chip.static_shared_bytes_max,
                spill_bytes: 0,
            };
            assert_eq!(cuda_problems(chip, &fits), Vec::<String>::new());
            let beyond = [
                CudaLaunch { threads: 1025, thread_registers: 32, ..fits },
                CudaLaunch { thread_registers: 256, ..fits },
                CudaLaunch { threads: 288, ..fits },
                CudaLaunch { static_shared_bytes: fits.static_shared_bytes + 1, dynamic_shared_bytes: 0, ..fits },
                CudaLaunch { dynamic_shared_bytes: fits.dynamic_shared_bytes + 1, ..fits },
                CudaLaunch { spill_bytes: 4, ..fits },
            ];
            for launch in beyond {
                assert!(!cuda_problems(chip, &launch).is_empty(), "{}: {launch:?}", chip.name);
            }
        }
        for chip in APPLE {
            let fits = MetalLaunch {
                threads: 1024,
                pipeline_threads_max: 0,
                threadgroup_bytes: 32 << 10,
                simd_width: 32,
                buffers: 31,
                argument_bytes: 4096,
                needs_tensor_units: chip.tensor_units,
                language: 40,
            };
            assert_eq!(metal_problems(chip, &fits), Vec::<String>::new());
            let beyond = [
                MetalLaunch { threads: 1025, ..fits },
                MetalLaunch { pipeline_threads_max: 512, ..fits },
                MetalLaunch { threadgroup_bytes: (32 << 10) + 1, ..fits },
                MetalLaunch { simd_width: 64, ..fits },
                MetalLaunch { buffers: 32, ..fits },
                MetalLaunch { argument_bytes: 4097, ..fits },
                MetalLaunch { language: 41, ..fits },
            ];
            for launch in beyond {
                assert_eq!(metal_problems(chip, &launch).len(), 1, "{}: {launch:?}", chip.name);
            }
        }
        assert_eq!(APPLE.iter().filter(|chip| chip.tensor_units).count(), 1);
    }

    #[test]
    fn the_tables_name_every_chip_once() {
        let names: Vec<_> = NVIDIA.iter().map(|chip| chip.name).collect();
        assert_eq!(names, ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"]);
        assert_eq!(APPLE.iter().map(|chip| chip.name).collect::<Vec<_>>(), ["M1", "M2", "M3", "M4", "M5"]);
        assert!(cpu_levels().iter().any(|(name, here)| *name == "scalar" && *here));
        let here = cpu_levels().iter().filter(|(_, here)| *here).count();
        assert_eq!(here, Level::available().len(), "a level has another name in the table");
    }
}
