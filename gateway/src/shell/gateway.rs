//! Startup and shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hyper::service::service_fn;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backends::health::{self, Verdict};
use crate::backends::{Backend, Backends, Health, Snapshot, StartError, tables};
use crate::config::Config;
use crate::data::{self, trust};
use crate::observe::{Exporter, Metrics, live};
use crate::shell::admin::{self, Guard};
use crate::shell::control::Control;
use crate::shell::discovery::{self, Resolve, SystemResolver};
use crate::shell::reload::{self, ReloadError, Reloaded};
use crate::shell::server::{Bound, ListenerTls, STATUS_CONNECTIONS, Server, bind, connections, routes};
use crate::shell::summary::{self, Probed, Summary, Troubles};
use crate::shell::{credentials, load, memory, switching, watchers};

/// Grace period at shutdown for status requests still in progress.
const STATUS_GRACE: Duration = Duration::from_secs(1);

/// The gateway.
#[derive(Debug)]
pub struct Gateway;

impl Gateway {
    /// Reads all files that the configuration names and checks that they are consistent, without serving or contacting
    /// engines. Returns what would be served, and what would be routed by load.
    ///
    /// # Errors
    /// `StartError`: the first reason why the gateway would not start.
    pub async fn check(config: &Config) -> Result<Probed, StartError> {
        ListenerTls::load(config)?;
        let (snapshot, _) = load_all(config.clone()).await?;
        Ok(Probed { served: Summary::new(&snapshot), troubles: Troubles(summary::misfits(&snapshot)) })
    }

    /// Does the work of [`Gateway::check`], then queries every engine for its identity and verifies its pins, without
    /// serving.
    ///
    /// # Errors
    /// `StartError`: the first reason why the gateway would not start. Problems with engines are part of the result.
    pub async fn probe(config: Config) -> Result<Probed, StartError> {
        ListenerTls::load(&config)?;
        let (snapshot, metrics) = load_all(config).await?;
        let backends = Backends::new(snapshot, Arc::new(metrics));
        let all = all_of(&backends);
        let verdicts = probe_all(&backends, &all).await;
        let mut troubles = summary::misfits(&backends.snapshot());
        for (backend, verdict) in verdicts {
            let cause = match verdict {
                Verdict::Admitted => backends.member(backend).and_then(|member| summary::ignored_pins(&member)),
                Verdict::Silent(error) => Some(error.to_string()),
                Verdict::Closed(closed) => Some(closed.to_string()),
            };
            troubles.extend(cause.map(|cause| format!("backend '{}': {cause}", backend.name)));
        }
        Ok(Probed { served: Summary::new(&backends.snapshot()), troubles: Troubles(troubles) })
    }

    /// Binds, loads, probes every backend once, and serves. A backend that does not answer yet is awaited in the
    /// background; one that does not match its tables serves requests routed by load.
    ///
    /// # Errors
    /// `StartError`: the first reason why the gateway does not start.
    pub async fn start(config: Config) -> Result<Running, StartError> {
        Self::start_with(config, Arc::new(SystemResolver)).await
    }

    /// Starts like [`Gateway::start`], but resolves names with `resolver`.
    ///
    /// # Errors
    /// `StartError`: the first reason why the gateway does not start.
    pub async fn start_with(config: Config, resolver: Arc<dyn Resolve>) -> Result<Running, StartError> {
        trust::warn_of_exposure(&config);
        let connections = connections(config.limits.connections)?;
        // Bind at once, so that a port in use is reported early; accept connections only when everything is loaded.
        let data = bind("requests", config.server.listen)?;
        let admin = bind("administration", config.server.admin)?;
        let metrics_bound = config.server.metrics.map(|address| bind("metrics", address)).transpose()?;
        let (data_addr, admin_addr) = (data.address, admin.address);
        let metrics_addr = metrics_bound.as_ref().map(|bound| bound.address);
        let tls = ListenerTls::load(&config)?;
        let (snapshot, metrics) = load_all(config).await?;
        let (tracer, exporter) = Exporter::start(&snapshot.config.tracing, &metrics.spans).unzip();
        let control = Arc::new(Control::new(snapshot, metrics, tracer));
        let backends = &control.backends;
        probe_all(backends, &all_of(backends)).await;
        let (data_listener, admin_listener) = (data.listen()?, admin.listen()?);
        let metrics_listener = metrics_bound.map(Bound::listen).transpose()?;
        let stop = CancellationToken::new();
        let watchers = TaskTracker::new();
        watchers::follow(&control, &backends.snapshot());
        watchers.spawn(tables::watch(Arc::clone(backends), stop.clone()));
        watchers.spawn(credentials::watch(Arc::clone(backends), tls.clone(), stop.clone()));
        watchers.spawn(switching::watch_pools(Arc::clone(&control), stop.clone()));
        watchers.spawn(memory::watch(Arc::clone(&control.data), stop.clone()));
        watchers.spawn(discovery::watch(Arc::clone(&control), resolver, stop.clone()));
        let settings = Arc::clone(backends);
        let live = live::Task::start(&control.live, move || settings.config());
        let guard = Guard::new(admin_addr, Arc::clone(backends));
        let plane = &control.data;
        let requests = {
            let plane = Arc::clone(plane);
            service_fn(move |request| data::serve(Arc::clone(&plane), request))
        };
        let data = Server::start(data_listener, requests, plane, tls.data, connections);
        let admin = routes(admin::router(Arc::clone(&control), guard));
        let mut status = vec![Server::start(admin_listener, admin, plane, tls.admin, STATUS_CONNECTIONS)];
        status.extend(metrics_listener.map(|listener| {
            let metrics = routes(admin::metrics_router(Arc::clone(&control)));
            Server::start(listener, metrics, plane, None, STATUS_CONNECTIONS)
        }));
        let open_streams = backends.config().limits.open_streams;
        tracing::info!(%data_addr, %admin_addr, connections, open_streams, "gateway is serving");
        Ok(Running { control, data, status, watchers, live, exporter, stop, data_addr, admin_addr, metrics_addr })
    }
}

async fn load_all(config: Config) -> Result<(Snapshot, Metrics), StartError> {
    let work = tokio::task::spawn_blocking(move || {
        let metrics = Metrics::new();
        load::snapshot(&Arc::new(config), &metrics).map(|snapshot| (snapshot, metrics))
    });
    work.await?
}

fn all_of(backends: &Backends) -> Vec<Arc<Backend>> {
    backends.snapshot().members().map(|(_, member)| Arc::clone(&member.backend)).collect()
}

async fn probe_all<'a>(backends: &Backends, all: &'a [Arc<Backend>]) -> Vec<(&'a Arc<Backend>, Verdict)> {
    join_all(all.iter().map(|backend| async move { (backend, health::probe_fully(backends, backend).await) })).await
}

fn url(address: SocketAddr, secure: bool) -> String {
    format!("{}://{address}", if secure { "https" } else { "http" })
}

/// A gateway that serves until [`Running::shutdown`]. Dropping it instead leaves its tasks to the runtime.
pub struct Running {
    control: Arc<Control>,
    data: Server,
    /// The admin plane and the metrics listener.
    status: Vec<Server>,
    watchers: TaskTracker,
    live: Option<live::Task>,
    exporter: Option<Exporter>,
    stop: CancellationToken,
    data_addr: SocketAddr,
    admin_addr: SocketAddr,
    metrics_addr: Option<SocketAddr>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("data_addr", &self.data_addr)
            .field("admin_addr", &self.admin_addr)
            .field("metrics_addr", &self.metrics_addr)
            .finish_non_exhaustive()
    }
}

impl Running {
    /// The address for clients.
    pub fn data_addr(&self) -> SocketAddr {
        self.data_addr
    }

    /// Returns the data plane's URL; https if it has certificates.
    pub fn data_url(&self) -> String {
        url(self.data_addr, self.control.backends.config().server.tls.is_some())
    }

    /// The admin plane's URL.
    pub fn admin_url(&self) -> String {
        url(self.admin_addr, self.control.backends.config().server.admin_tls.is_some())
    }

    /// The admin plane's address.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin_addr
    }

    /// The metrics listener's address, if there is one.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics_addr
    }

    /// Returns a backend's health; `None` if no backend has that name.
    pub fn health(&self, backend: &str) -> Option<Health> {
        self.control.backends.backend(backend).map(|backend| backend.health())
    }

    /// Completes once a backend's health satisfies `wanted`; returns `None` if no backend has that name.
    pub async fn wait_health(&self, backend: &str, wanted: impl FnMut(&Health) -> bool) -> Option<Health> {
        let mut changes = self.control.backends.backend(backend)?.watch_health();
        changes.wait_for(wanted).await.ok().map(|health| health.clone())
    }

    /// Completes once every backend is healthy.
    pub async fn wait_ready(&self) {
        for backend in all_of(&self.control.backends) {
            // The sender lives as long as the backend, which is held here.
            let _ = backend.watch_health().wait_for(Health::is_healthy).await;
        }
    }

    /// Rereads the configuration file and applies it. On an error the old configuration stays in effect.
    ///
    /// # Errors
    /// The problem with the file or with the files it names.
    pub async fn reload(&self) -> Result<Reloaded, ReloadError> {
        reload::reload(&self.control).await
    }

    /// Shuts down according to `[drain]`: signals load balancers first (`/readyz` is 503) while still accepting
    /// requests, then calls [`Running::shutdown`]. `hurried`: skips that signal.
    pub async fn drain(self, hurried: bool) {
        let rules = self.control.backends.config().drain;
        self.control.data.drain();
        if !hurried && !rules.delay.is_zero() {
            tracing::info!(
                seconds = rules.delay.as_secs_f64(),
                "gateway is draining and will soon stop accepting connections"
            );
            tokio::time::sleep(rules.delay).await;
        }
        self.shutdown(rules.grace).await;
    }

    /// Stops accepting requests, waits at most `grace` for running ones, then closes the rest with an error. The other
    /// listeners, and probes, run until then.
    pub async fn shutdown(self, grace: Duration) {
        self.control.data.drain();
        tracing::info!(seconds = grace.as_secs_f64(), "gateway is stopping: waiting for running requests to finish");
        self.data.shutdown(grace, || self.control.data.close()).await;
        self.stop.cancel();
        self.watchers.close();
        self.watchers.wait().await;
        watchers::stop(&self.control).await;
        join_all(self.status.into_iter().map(|server| server.shutdown(STATUS_GRACE, || ()))).await;
        if let Some(live) = self.live {
            live.stop().await;
        }
        if let Some(exporter) = self.exporter {
            exporter.stop().await;
        }
        tracing::info!("gateway stopped");
    }
}
