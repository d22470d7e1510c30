//! Holds the kernel families beside the linears to the CPU's bits on the GPU of this machine, and times them.
//!
//! `tf-families-check [check] [time] [--only NAME] [--rows N,..] [--out FILE]`. `check` compares every family at tiny, demo
//! and release sizes; `time` at release sizes, with the device's time: graphs of calls on the same buffers, so the
//! second-level cache is warm; `--rows` names other numbers of rows for it. The kernels are those that the build embeds.
//! Records go to FILE, one JSON object a line.

use anyhow::{Context, Result, bail};
use serde_json::json;
use std::io::Write;
use tf_contract::families::{DEMO, Outcome, RELEASE, Sizes, TINY, Timer, check, check_draws};
use tf_device::cuda::{CudaError, Gpu, Trial, device_on_trial};
use tf_device::{Device, LaunchError, Queue};
use tf_kernels::cubins;

const CALLS: usize = 16;
const REPLAYS: usize = 20;

/// The release with as much context as it takes.
const LONG: Sizes = Sizes { name: "long", context: 1_048_000, ..RELEASE };

/// The release where a row's list is one block's, but several keys a thread.
const MIDDLE: Sizes = Sizes { name: "middle", context: 9001, ..RELEASE };

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut modes, mut out, mut only, mut timed) = (Vec::new(), None, None, vec![1, 6, 16, 128]);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = Some(arguments.next().context("--out needs a file")?),
            "--rows" => {
                let list = arguments.next().context("--rows needs numbers with commas between them")?;
                timed = list.split(',').map(str::parse).collect::<Result<_, _>>().with_context(|| list.clone())?;
            }
            "--only" => only = Some(arguments.next().context("--only needs a name")?),
            "check" | "time" => modes.push(argument),
            other => bail!("`{other}` is none of check, time, --only NAME, --rows N,.., --out FILE"),
        }
    }
    if modes.is_empty() {
        bail!(
            "usage: tf-families-check [check] [time] [--only NAME] [--rows N,..] [--out FILE], with check, time or both"
        );
    }
    let mut file = out.map(|path| std::fs::File::create(&path).with_context(|| path.clone())).transpose()?;
    // Its stream is captured, so launches have to be in it.
    let device = device_on_trial(0, cubins::find, Trial::default())?;
    let Device::Gpu(gpu) = &device else { bail!("CUDA devices are GPUs") };
    let mut queue = Queue::gpu(gpu);
    println!("{}, sm_{}", gpu.name(), gpu.limits().target);
    let (mut compared, mut failures) = (0, 0);
    let mut say = |outcome: &Outcome| {
        println!("{outcome}");
        compared += 1;
        failures += usize::from(outcome.differ > 0 || outcome.compared == 0);
        if let Some(file) = &mut file {
            let record = json!({
                "family": outcome.family, "sizes": outcome.sizes, "rows": outcome.rows, "compared": outcome.compared,
                "differ": outcome.differ, "first": outcome.first, "moved_bytes": outcome.moved_bytes,
                "us": outcome.microseconds,
            });
            // A record that can't be written shows as a short file; the lines above stand.
            let _ = writeln!(file, "{record}");
        }
    };
    let has = |mode: &str| modes.iter().any(|found| found == mode);
    let only = only.as_deref();
    if has("check") {
        check(&device, &mut queue, TINY, &[1, 2, 3, 5, 8, 9, 16, 33, 70], only, None, &mut say)?;
        check(&device, &mut queue, DEMO, &[1, 5, 17, 64], only, None, &mut say)?;
        check(&device, &mut queue, RELEASE, &[1, 4, 17], only, None, &mut say)?;
        check(&device, &mut queue, MIDDLE, &[1, 4], Some(only.unwrap_or("index_score")), None, &mut say)?;
        check_draws(&device, &mut queue, TINY, &[1, 9], only, None, &mut say)?;
        check_draws(&device, &mut queue, RELEASE, &[1, 6, 40], only, None, &mut say)?;
    }
    if has("time") {
        let timer: Timer<'_> = &time;
        check(&device, &mut queue, RELEASE, &timed, only, Some(timer), &mut say)?;
        check_draws(&device, &mut queue, RELEASE, &[1, 6, 64], only, Some(timer), &mut say)?;
        let index = only.unwrap_or("index_score");
        check(&device, &mut queue, LONG, &[1], Some(index), Some(timer), &mut say)?;
    }
    if failures > 0 || compared == 0 {
        bail!("{failures} of {compared} checks failed");
    }
    println!("{compared} checks, 0 differ");
    Ok(())
}

/// Why a time is missing.
enum Failure {
    Launch(LaunchError),
    Cuda(CudaError),
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        Failure::Cuda(error)
    }
}

/// Microseconds of a call: the median over replays of a graph of calls.
fn time(queue: &mut Queue, launch: &mut dyn FnMut(&mut Queue) -> Result<(), LaunchError>) -> Result<f64, LaunchError> {
    let Queue::Gpu(gpu_queue) = &*queue else { return Ok(f64::NAN) };
    let driver = gpu_queue.driver().clone();
    let Some(gpu) = driver.cuda() else { return Ok(f64::NAN) };
    // Afterwards the launch's metadata lie on the device, and a graph needs kernels only.
    launch(queue)?;
    queue.finish()?;
    measure(queue, launch, gpu).map_err(|failure| match failure {
        Failure::Launch(error) => error,
        Failure::Cuda(error) => LaunchError::Device { device: gpu.name.clone(), text: error.to_string() },
    })
}

fn measure(
    queue: &mut Queue,
    launch: &mut dyn FnMut(&mut Queue) -> Result<(), LaunchError>,
    gpu: &Gpu,
) -> Result<f64, Failure> {
    let mut launched = Ok(());
    let graph = gpu.capture(|| {
        launched = (0..CALLS).try_for_each(|_| launch(queue));
        Ok::<(), CudaError>(())
    })?;
    launched.map_err(Failure::Launch)?;
    for _ in 0..3 {
        gpu.replay(&graph)?;
    }
    let mut samples = Vec::new();
    for _ in 0..REPLAYS {
        let from = gpu.event()?;
        gpu.replay(&graph)?;
        let to = gpu.event()?;
        samples.push(gpu.microseconds(&from, &to)? / CALLS as f64);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[REPLAYS / 2])
}
