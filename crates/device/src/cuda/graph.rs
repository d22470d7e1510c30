//! A sequence of launches as one, and time on the device.

use super::error::{CudaError, check};
use super::gpu::{Context, Gpu};
use cudarc::driver::sys;
use std::sync::Arc;

/// Launches recorded once and replayed as a whole, with the arguments they were recorded with.
#[derive(Debug)]
pub struct Graph {
    exec: sys::CUgraphExec,
    inner: Arc<Context>,
}

// SAFETY: an executable graph is a handle of the driver and is launched through one stream.
unsafe impl Send for Graph {}

/// A point in a stream's time.
#[derive(Debug)]
pub struct Event {
    event: sys::CUevent,
    inner: Arc<Context>,
}

/// What a stream was given while it was captured. Goes after the instances that are changed by the names of its nodes.
#[derive(Debug)]
pub(super) struct Captured {
    graph: sys::CUgraph,
    inner: Arc<Context>,
}

// SAFETY: a graph is a handle of the driver and is used by one thread at a time.
unsafe impl Send for Captured {}

impl Captured {
    /// A graph that runs it.
    pub fn instance(&self) -> Result<Graph, CudaError> {
        self.inner.enter()?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was captured in `Gpu::captured`.
        check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, self.graph, 0) })?;
        Ok(Graph { exec, inner: self.inner.clone() })
    }
}

impl Graph {
    pub(super) fn exec(&self) -> sys::CUgraphExec {
        self.exec
    }
}

impl Gpu {
    /// What `launches` puts into the stream, which does not run, and what it returns.
    pub(super) fn captured<T, E: From<CudaError>>(
        &self,
        launches: impl FnOnce() -> Result<T, E>,
    ) -> Result<(Captured, T), E> {
        self.inner.enter()?;
        let stream = self.inner.stream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `inner` and captures nothing yet.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let launched = launches();
        let mut captured = Captured { graph: std::ptr::null_mut(), inner: self.inner.clone() };
        // SAFETY: ends the capture begun above, also after a failure, so that the stream is usable again.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &mut captured.graph) });
        let launched = launched?;
        ended?;
        Ok((captured, launched))
    }

    /// Records what `launches` puts into the stream, without running it.
    ///
    /// # Errors
    /// Those of `launches`; [`CudaError::Driver`].
    pub fn capture<E: From<CudaError>>(&self, launches: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let (captured, ()) = self.captured(launches)?;
        Ok(captured.instance()?)
    }

    /// Puts a whole graph into the stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        self.inner.enter()?;
        // SAFETY: the graph is instantiated and its context is the current one.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.exec, self.inner.stream) })
    }

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn event(&self) -> Result<Event, CudaError> {
        self.inner.enter()?;
        self.event_in(self.inner.stream)
    }

    /// The same for a stream of this device, whose context is this thread's own.
    pub(super) fn event_in(&self, stream: sys::CUstream) -> Result<Event, CudaError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `Event::drop`.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        let event = Event { event, inner: self.inner.clone() };
        // SAFETY: event and stream belong to the current context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.event, stream) })?;
        Ok(event)
    }

    /// Microseconds from `from` to `to`; waits for `to`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn microseconds(&self, from: &Event, to: &Event) -> Result<f64, CudaError> {
        self.inner.enter()?;
        // SAFETY: the event was recorded in `event`.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(to.event) })?;
        let mut milliseconds = 0.0;
        // SAFETY: both events were recorded and the later one is complete.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, from.event, to.event) })?;
        Ok(f64::from(milliseconds) * 1000.0)
    }
}

impl Event {
    pub(super) fn handle(&self) -> sys::CUevent {
        self.event
    }

    /// Waits until the stream has passed this point.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn wait(&self) -> Result<(), CudaError> {
        self.inner.enter()?;
        // SAFETY: the event was recorded in `Gpu::event`.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }
}

// SAFETY: an event is a handle of the driver, which locks its own state.
unsafe impl Send for Event {}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.graph.is_null() && self.inner.enter().is_ok() {
            // SAFETY: captured in `Gpu::captured` and destroyed once; instances hold copies of their own.
            unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.inner.enter().is_ok() {
            // SAFETY: instantiated once and destroyed once; the driver keeps a graph that still runs until it is done.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.inner.enter().is_ok() {
            // SAFETY: created in `Gpu::event` and destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
