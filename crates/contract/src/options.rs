//! What the program is asked to do.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Where kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    Cpu,
    Cuda,
    Metal,
}

impl Backend {
    /// As an argument and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Cuda => "cuda",
            Backend::Metal => "metal",
        }
    }

    /// As the summary names it.
    pub const fn title(self) -> &'static str {
        match self {
            Backend::Cpu => "CPU",
            Backend::Cuda => "CUDA",
            Backend::Metal => "Metal",
        }
    }
}

/// Proves the registered kernels on this machine.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The program that was asked, as the summary names it.
    #[arg(skip = "tf-kernel-contract")]
    pub program: &'static str,
    /// Backend whose kernels are proved.
    #[arg(long, value_enum, default_value = "cpu")]
    pub backend: Backend,
    /// FAMILY, FAMILY/KERNEL, FAMILY/ (its kernel of the same name alone), a list with commas, or dsv41: all of DeepSeek-V4.1.
    #[arg(long, value_name = "WHICH", default_value = "dsv41")]
    pub only: String,
    /// List the kernels with their cases and controls, and run nothing.
    #[arg(long)]
    pub list: bool,
    /// Write the report of docs/reference/contract.schema.json to FILE.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Run one case alone, as a failing case prints it: KERNEL:CASE:GATE:SEED.
    #[arg(long, value_name = "CASE")]
    pub replay: Option<String>,
    /// Time the cases after proving them, on the CPU.
    #[arg(long)]
    pub time: bool,
    /// On CUDA: also launch smaller cases under the memory and the race checker of compute-sanitizer.
    #[arg(long)]
    pub checkers: bool,
    /// On CUDA: compiled edits of the controls are taken from FOLDER and kept there. Without it they are compiled anew.
    #[arg(long, value_name = "FOLDER")]
    pub edits: Option<PathBuf>,
    /// Compile the controls' edits for a target such as 90a into the folder of --edits, and prove nothing: needs no GPU.
    #[arg(long, value_name = "TARGET", requires = "edits")]
    pub compile_edits: Option<String>,
    /// Launch smaller cases and judge nothing: for a checker that watches this process.
    #[arg(long)]
    pub launch_only: bool,
    /// Also judge the values of N fresh seeds.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seeds: usize,
}

impl Options {
    /// The beginning of every command line for the same backend.
    pub fn start(&self) -> String {
        let mut command = self.program.to_owned();
        if self.backend != Backend::Cpu {
            command.push_str(&format!(" --backend {}", self.backend.name()));
        }
        command
    }

    /// The command line that gives these options, as the summary names it.
    pub fn command(&self) -> String {
        let mut command = self.start();
        command.push_str(&format!(" --only {}", self.only));
        if self.checkers {
            command.push_str(" --checkers");
        }
        if self.seeds > 0 {
            command.push_str(&format!(" --seeds {}", self.seeds));
        }
        command
    }
}
