//! Holds the CUDA linears, experts and head to their mirror on the GPU of this machine, bit for bit, and times them and attention.
//!
//! `tf-cuda-check [check] [long] [time] [cost] [--out FILE] [--only NAME]`. `check` asks the tensor-core step and compares every
//! launch at 1 to 71 rows with [`tf_numerics::fma16`]; `long` compares every row of long prompts with the same row alone;
//! `time` replays graphs of calls over rotating weights; `cost` asks what one order for every row count costs. The kernels
//! are those that the build embeds. Records go to FILE, one JSON object a line.

mod attention;
mod cost;
mod experts;
mod linears;
mod random;
mod speed;

use std::fs;
use std::io::Write;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tf_device::cuda::{self, Gpu};
use tf_device::{Device, Queue};
use tf_kernels::linear::cuda::Format;
use tf_kernels::{cubins, tensor_step};

use crate::experts::{Mixture, SIZES};
use crate::random::Tally;
use crate::speed::Timer;

const LONG_ROWS: [usize; 2] = [512, 2000];
/// Of experts, so that every size of tile occurs.
const LONG_EXPERT_ROWS: [usize; 5] = [66, 130, 150, 512, 2000];
const TIMED_ROWS: [usize; 9] = [1, 4, 6, 16, 32, 64, 128, 512, 2048];
/// Of the head: rows that draw a token.
const HEAD_ROWS: usize = 128;

/// A line for whoever reads along, who may leave: the records go on.
pub(crate) fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

struct Session {
    device: Device,
    queue: Queue,
    gpu: Gpu,
    records: Vec<serde_json::Value>,
    failures: usize,
    only: Option<String>,
}

impl Session {
    fn open(only: Option<String>) -> Result<Session> {
        // Its stream is captured, so launches have to be in it.
        let device = cuda::device_on_trial(0, cubins::find, cuda::Trial::default())?;
        let Device::Gpu(gpu_device) = &device else { bail!("the device is no GPU") };
        let queue = Queue::gpu(gpu_device);
        let gpu = gpu_device.driver().cuda().context("the device is not CUDA")?.clone();
        Ok(Session { device, queue, gpu, records: Vec::new(), failures: 0, only })
    }

    fn describe(&mut self) -> Result<()> {
        let gpu = &self.gpu;
        let (free, total) = (gpu.free_bytes()? >> 20, gpu.memory_bytes >> 20);
        say(format_args!(
            "{}: sm_{}, driver CUDA {}, {} multiprocessors, L2 {} MiB, {free} of {total} MiB free; cubins for sm_{}",
            gpu.name,
            gpu.target(),
            gpu.driver,
            gpu.multiprocessors,
            gpu.l2_bytes >> 20,
            cubins::targets().join(", ")
        ));
        self.records.push(json!({
            "device": gpu.name, "target": gpu.target(), "driver": gpu.driver, "multiprocessors": gpu.multiprocessors,
            "l2_bytes": gpu.l2_bytes, "memory_bytes": gpu.memory_bytes, "clock_khz": gpu.clock_khz,
        }));
        Ok(())
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn judge(&mut self, name: &str, started: Instant, tally: &Tally) {
        let first = tally.first.as_ref().map(|text| format!("; first at {text}")).unwrap_or_default();
        let seconds = started.elapsed().as_secs_f64();
        let (compared, bad) = (tally.compared, tally.bad);
        say(format_args!("{name:<24} {compared:>12} compared, {bad:>8} differ, {seconds:.1} s{first}"));
        self.failures += usize::from(tally.bad > 0 || tally.compared == 0);
        self.records.push(json!({"check": name, "compared": tally.compared, "bad": tally.bad, "first": tally.first}));
    }

    fn probe(&mut self) -> Result<()> {
        for (steps, tiles) in [(1, 8192), (4, 4096), (40, 512)] {
            let started = Instant::now();
            let Queue::Gpu(queue) = &mut self.queue else { bail!("the queue is no GPU's") };
            let found = tensor_step::probe(queue, tiles, steps, 1)?;
            let tally = Tally { compared: found.compared as u64, bad: found.differ as u64, first: found.first };
            self.judge(&format!("probe K={}", steps * 16), started, &tally);
        }
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        if self.wants("probe") {
            self.probe()?;
        }
        for case in linears::cases().iter().filter(|case| self.wants(case.name)).collect::<Vec<_>>() {
            let started = Instant::now();
            let tally = linears::check(&self.device, &mut self.queue, case)?;
            self.judge(case.name, started, &tally);
        }
        for sizes in SIZES {
            if self.wants(sizes.name) {
                let started = Instant::now();
                let mixture = Mixture::random(&self.device, sizes)?;
                let tally = mixture.check(&self.device, &mut self.queue, &linears::ROW_COUNTS)?;
                self.judge(sizes.name, started, &tally);
            }
        }
        Ok(())
    }

    fn long(&mut self) -> Result<()> {
        for case in linears::cases().iter().filter(|case| self.wants(case.name)).collect::<Vec<_>>() {
            let started = Instant::now();
            let rows: &[usize] = if case.name == "head" { &[100] } else { &LONG_ROWS };
            let tally = linears::check_long(&self.device, &mut self.queue, case, rows)?;
            self.judge(&format!("long {}", case.name), started, &tally);
        }
        for sizes in SIZES {
            if self.wants(sizes.name) {
                let started = Instant::now();
                let mixture = Mixture::random(&self.device, sizes)?;
                let tally = mixture.check_long(&self.device, &mut self.queue, &LONG_EXPERT_ROWS)?;
                self.judge(&format!("long {}", sizes.name), started, &tally);
            }
        }
        Ok(())
    }

    fn time(&mut self) -> Result<()> {
        let wanted = |name: &str| self.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
        let gpu = self.gpu.clone();
        let mut timer = Timer { device: &self.device, queue: &mut self.queue, gpu, records: Vec::new() };
        timer.heading();
        for case in linears::timed().iter().filter(|case| wanted(case.name)) {
            let most = if case.format == Format::Head { HEAD_ROWS } else { usize::MAX };
            let rows: Vec<usize> = TIMED_ROWS.into_iter().filter(|rows| *rows <= most).collect();
            timer.linear(case, &rows)?;
        }
        if wanted("attention") {
            timer.attention(&TIMED_ROWS)?;
        }
        if wanted("experts") {
            timer.experts(&[1, 2, 4, 6, 8, 16, 32, 64, 128, 512, 2048])?;
        }
        self.records.append(&mut timer.records);
        Ok(())
    }

    fn cost(&mut self) -> Result<()> {
        let wanted = |name: &str| self.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
        let gpu = self.gpu.clone();
        let mut timer = Timer { device: &self.device, queue: &mut self.queue, gpu, records: Vec::new() };
        cost::heading();
        for case in linears::timed().iter().filter(|case| cost::has_chunks(case) && wanted(case.name)) {
            timer.linear_cost(case)?;
        }
        if wanted("attention") {
            timer.attention_cost()?;
        }
        if wanted("experts") {
            timer.expert_cost()?;
        }
        self.records.append(&mut timer.records);
        Ok(())
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut modes, mut out, mut only) = (Vec::new(), None, None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = arguments.next(),
            "--only" => only = arguments.next(),
            "check" | "long" | "time" | "cost" => modes.push(argument),
            other => bail!("`{other}` is none of check, long, time, cost, --out FILE, --only NAME"),
        }
    }
    let has = |mode: &str| modes.iter().any(|found| found == mode);
    let mut session = Session::open(only)?;
    session.describe()?;
    type Mode = fn(&mut Session) -> Result<()>;
    let all: [(&str, Mode); 4] =
        [("check", Session::check), ("long", Session::long), ("time", Session::time), ("cost", Session::cost)];
    for (mode, run) in all.into_iter().filter(|(mode, _)| has(mode)) {
        let started = Instant::now();
        run(&mut session)?;
        say(format_args!("\n{mode}: {:.0} s", started.elapsed().as_secs_f64()));
    }
    if let Some(path) = out {
        let mut file = fs::File::create(&path).with_context(|| path.clone())?;
        for record in &session.records {
            writeln!(file, "{record}")?;
        }
    }
    if session.failures > 0 {
        bail!("{} checks failed", session.failures);
    }
    Ok(())
}
