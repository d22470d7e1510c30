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

impl Gpu {
    /// Records what `launches` puts into the stream, without running it.
    ///
    /// # Errors
    /// Those of `launches`; [`CudaError::Driver`].
    pub fn capture<E: From<CudaError>>(&self, launches: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.inner.enter()?;
        let stream = self.inner.stream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `inner` and captures nothing yet.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let launched = launches();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, also after a failure, so that the stream is usable again.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
        launched?;
        ended?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just captured.
        let made = check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) });
        // SAFETY: the executable graph holds its own copy.
        check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) })?;
        made?;
        Ok(Graph { exec, inner: self.inner.clone() })
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
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `Event::drop`.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        let event = Event { event, inner: self.inner.clone() };
        // SAFETY: event and stream belong to the current context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.event, self.inner.stream) })?;
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

impl Drop for Graph {
    fn drop(&mut self) {
        if self.inner.enter().is_ok() {
            // SAFETY: instantiated in `capture` and destroyed once.
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
