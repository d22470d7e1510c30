//! Rounds as CUDA graphs: a chain of kernel nodes that is captured once and changed node by node.

use super::error::{CudaError, check};
use super::gpu::{Context, Gpu};
use super::graph::{Captured, Event, Graph};
use super::launch::{Kernel, Shape};
use crate::gpu::rounds::{Calls, Clock, Cut, Line, Recorded};
use cudarc::driver::sys;

/// An instantiated graph, and what its nodes are named by: those of the capture that it was made from.
#[derive(Debug)]
pub(super) struct RoundGraph {
    graph: Graph,
    /// One for each launch, in their order.
    nodes: Vec<sys::CUgraphNode>,
    /// Owns the nodes.
    _captured: Captured,
}

// SAFETY: the nodes are handles of the driver, which locks its own state; they are used by one thread at a time, behind `&mut`.
unsafe impl Send for RoundGraph {}

/// The stream of a GPU, for launches of its kernels by number. Its context is this thread's own.
pub(super) struct Stream<'a> {
    pub gpu: &'a Gpu,
    pub kernels: &'a [Kernel],
}

pub(super) fn shape_of(cut: &Cut) -> Shape {
    Shape {
        blocks: cut.blocks as usize,
        threads: cut.threads as usize,
        shared_bytes: cut.shared_bytes as usize,
        cluster: cut.cluster as usize,
        overlap: cut.overlap,
    }
}

/// The main line and the side while they are captured.
struct Capture<'a> {
    stream: &'a Stream<'a>,
    /// Whether the side follows the newest launch of the main line, and whether it has launches that the main line lacks.
    is_behind_main: bool,
    is_apart: bool,
    /// Where the lines wait for each other; kept while they are captured.
    events: Vec<Event>,
}

impl Capture<'_> {
    /// Captures one launch; returns its node.
    fn launch(&mut self, cut: &Cut, arguments: &[u8]) -> Result<sys::CUgraphNode, CudaError> {
        let Context { stream: main, side, .. } = *self.stream.gpu.inner;
        let mut shape = shape_of(cut);
        let into = match cut.line {
            Line::Main => main,
            Line::Side => {
                if !self.is_behind_main {
                    self.follow(side, main)?;
                    // Only behind a launch of its own line can it start early.
                    shape.overlap = false;
                }
                (self.is_behind_main, self.is_apart) = (true, true);
                side
            }
            Line::Joined => {
                shape.overlap &= !self.is_apart;
                self.join()?;
                main
            }
        };
        self.is_behind_main &= cut.line == Line::Side;
        self.stream.gpu.launch_checked(into, &self.stream.kernels[cut.kernel as usize], shape, arguments)?;
        self.stream.last_captured(into)
    }

    /// What the main line captures from here on follows the side.
    fn join(&mut self) -> Result<(), CudaError> {
        if std::mem::take(&mut self.is_apart) {
            let Context { stream: main, side, .. } = *self.stream.gpu.inner;
            self.follow(main, side)?;
        }
        Ok(())
    }

    /// Lets `stream` wait for what `other` has captured so far.
    fn follow(&mut self, stream: sys::CUstream, other: sys::CUstream) -> Result<(), CudaError> {
        let event = self.stream.gpu.event_in(other)?;
        // SAFETY: event and streams belong to the current context.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event.handle(), 0) })?;
        self.events.push(event);
        Ok(())
    }
}

impl Stream<'_> {
    /// The node that `stream` captured last: what the next one would follow.
    fn last_captured(&self, stream: sys::CUstream) -> Result<sys::CUgraphNode, CudaError> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut nodes, mut edges, mut count) = (std::ptr::null(), std::ptr::null(), 0);
        let (mut id, mut graph) = (0, std::ptr::null_mut());
        // SAFETY: writes what it is asked for; the list belongs to the driver and is read before the next call.
        check("cuStreamGetCaptureInfo", unsafe {
            sys::cuStreamGetCaptureInfo_v3(stream, &mut status, &mut id, &mut graph, &mut nodes, &mut edges, &mut count)
        })?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE || count != 1 || nodes.is_null() {
            let text = format!("a launch left {count} nodes at the end of the capture ({status:?}), not one");
            return Err(CudaError::Driver { call: "cuStreamGetCaptureInfo", code: 0, text });
        }
        // SAFETY: the list has one entry, checked above.
        Ok(unsafe { *nodes })
    }
}

impl Calls for Stream<'_> {
    type Graph = RoundGraph;
    type Error = CudaError;

    fn launch(&mut self, cut: &Cut, arguments: &[u8]) -> Result<(), CudaError> {
        let stream = self.gpu.inner.stream;
        self.gpu.launch_checked(stream, &self.kernels[cut.kernel as usize], shape_of(cut), arguments)
    }

    fn build(&mut self, round: &Recorded) -> Result<RoundGraph, CudaError> {
        let gpu = self.gpu;
        let (captured, nodes) = gpu.captured(|| {
            let mut capture = Capture { stream: self, is_behind_main: false, is_apart: false, events: Vec::new() };
            let nodes = round.iter().map(|(cut, arguments)| capture.launch(cut, arguments));
            let nodes = nodes.collect::<Result<Vec<_>, CudaError>>()?;
            capture.join()?;
            Ok::<_, CudaError>(nodes)
        })?;
        Ok(RoundGraph { graph: captured.instance()?, nodes, _captured: captured })
    }

    fn change(&mut self, graph: &mut RoundGraph, index: usize, cut: &Cut, arguments: &[u8]) -> Result<(), CudaError> {
        let kernel = &self.kernels[cut.kernel as usize];
        let mut pointers = kernel.pointers(arguments)?;
        let params = sys::CUDA_KERNEL_NODE_PARAMS {
            func: kernel.function(),
            gridDimX: cut.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: cut.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: cut.shared_bytes,
            kernelParams: pointers.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: the node belongs to the graph of this instance; every argument has the kernel's own size, checked when the
        // launch was noted, and is copied during the call.
        check("cuGraphExecKernelNodeSetParams", unsafe {
            sys::cuGraphExecKernelNodeSetParams_v2(graph.graph.exec(), graph.nodes[index], &params)
        })
    }

    fn replay(&mut self, graph: &RoundGraph) -> Result<(), CudaError> {
        self.gpu.replay(&graph.graph)
    }
}

impl Clock for Stream<'_> {
    fn name(&self, kernel: u32) -> String {
        self.kernels[kernel as usize].name.clone()
    }

    fn microseconds(&mut self, graph: &RoundGraph, repetitions: u32) -> Result<f64, CudaError> {
        self.replay(graph)?;
        let mut marks = vec![self.gpu.event()?];
        for _ in 0..repetitions.max(1) {
            self.replay(graph)?;
            marks.push(self.gpu.event()?);
        }
        let each = marks.windows(2).map(|pair| self.gpu.microseconds(&pair[0], &pair[1]));
        let mut each = each.collect::<Result<Vec<f64>, CudaError>>()?;
        each.sort_by(f64::total_cmp);
        Ok(each[each.len() / 2])
    }
}
