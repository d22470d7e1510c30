//! Accepts connections and knows when a client is gone.
//!
//! A client that closes its sending side may still read: it gets its reply. One that closes the whole connection looks the
//! same until something is written to it. So while a reply hasn't begun, an interim `100 Continue` is sent from time to
//! time, which every client skips, and while one is being written its stream says something more often. The other side's
//! reset then tells that nobody is there, and the request is dropped.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tf_engine::Time;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tower::ServiceExt;

/// Connections at once; further ones wait to be accepted.
pub const CONNECTIONS_MAX: usize = 4096;
/// How often a client that has closed its sending side is asked whether it is there.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How long to wait before another connection is accepted when the system refuses one.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Tells a client to go on; as an answer before the answer it means nothing.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What a request's task may know about its connection.
#[derive(Clone, Debug, Default)]
pub struct Peer(Arc<Mutex<State>>);

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub peer: Peer,
    /// When its head was read.
    pub at: Time,
}

#[derive(Debug, Default)]
struct State {
    /// A request is being answered and no byte of its answer is on the way.
    is_waiting: bool,
    /// The client sends nothing any more.
    is_half_closed: bool,
}

impl Peer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the client has closed its sending side, so that only a write tells whether it still reads.
    pub fn is_half_closed(&self) -> bool {
        self.state().is_half_closed
    }
}

/// Serves `app` until `closed` says so, then lets open replies end. `open` counts connections.
///
/// # Errors
/// None so far: a connection that breaks is its client's affair.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    open: Arc<AtomicU32>,
    mut closed: watch::Receiver<bool>,
) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (alive, mut all_gone) = mpsc::channel::<Infallible>(1);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = closed.wait_for(|closed| *closed) => break,
        };
        let Some((stream, place)) = accepted else { continue };
        let (app, closed, alive, open) = (app.clone(), closed.clone(), alive.clone(), open.clone());
        tokio::spawn(async move {
            open.fetch_add(1, Ordering::Relaxed);
            connection(Arc::new(stream), app, closed).await;
            open.fetch_sub(1, Ordering::Relaxed);
            drop((place, alive));
        });
    }
    drop((listener, alive));
    // Every connection holds a sender.
    let _ = all_gone.recv().await;
    Ok(())
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Pieces of a stream are small and must not wait for company.
            let _ = stream.set_nodelay(true);
            Some((stream, place))
        }
        Err(error) => {
            tracing::warn!(%error, "a connection can't be accepted");
            tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
            None
        }
    }
}

async fn connection(stream: Arc<TcpStream>, app: Router, mut closed: watch::Receiver<bool>) {
    let peer = Peer::default();
    let seen = peer.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (app, peer) = (app.clone(), seen.clone());
        async move {
            // A client of HTTP/1.0 takes an interim answer for the answer.
            peer.state().is_waiting = request.version() > Version::HTTP_10;
            request.extensions_mut().insert(peer.clone());
            let response: Result<Response<Body>, Infallible> = app.oneshot(request.map(Body::new)).await;
            peer.state().is_waiting = false;
            response
        }
    });
    let http = http1::Builder::new().half_close(true).serve_connection(TokioIo::new(Shared(stream.clone())), service);
    let mut http = std::pin::pin!(http);
    let mut is_closing = false;
    let mut gone = std::pin::pin!(gone(&stream, &peer));
    loop {
        tokio::select! {
            // A broken connection is its client's affair.
            _ = http.as_mut() => return,
            () = gone.as_mut() => return,
            _ = closed.wait_for(|closed| *closed), if !is_closing => {
                is_closing = true;
                http.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Ready when nobody is at the other end any more.
async fn gone(stream: &TcpStream, peer: &Peer) {
    loop {
        match stream.peek(&mut [0]).await {
            Ok(0) => break,
            // A request that hasn't been read yet.
            Ok(_) => tokio::time::sleep(ASK_EVERY).await,
            Err(_) => return,
        }
    }
    peer.state().is_half_closed = true;
    loop {
        {
            let state = peer.state();
            // A write that isn't taken whole would tear the answer; so small a one fits, or nothing does.
            if state.is_waiting
                && stream.try_write(INTERIM).is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock)
            {
                return;
            }
        }
        tokio::time::sleep(ASK_EVERY).await;
        if !matches!(stream.take_error(), Ok(None)) {
            return;
        }
    }
}

/// A stream that is read and written by its connection, and watched beside it.
struct Shared(Arc<TcpStream>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(context))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl Shared {
    fn poll_with(
        &self,
        context: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(context))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_with(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(context, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// The last share closes the connection.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
