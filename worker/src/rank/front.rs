//! Rank 0: forms the unit, serves HTTP for it, and stops it.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use semmoe_tables::RankId;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use super::config::{WorkerConfig, WorkerEvent};
use super::error::WorkerError;
use super::prepare::{Prepared, prepare};
use super::start::{self, Connected};
use crate::control::link;
use crate::control::message::{FromRank, ToRank};
use crate::control::{Host, Patience, listen};
use crate::engine::{Engine, EngineEnd, UnitLimits};
use crate::ep::{ExpertPlacement, ForcedRate};
use crate::serve::{self, App, Gate};
use crate::unit::{Lost, Port, Shutdown, Timeouts, Unit, UnitLayout, UnitStatus};

/// Time limits after the grace period: for cancelled sequences, then for open connections, then for the ranks and
/// finally for their links.
const CANCEL_LIMIT: Duration = Duration::from_millis(1500);
const CONNECTIONS_LIMIT: Duration = Duration::from_millis(1000);
const STOP_LIMIT: Duration = Duration::from_millis(1500);
const CLOSE_LIMIT: Duration = Duration::from_millis(500);

pub(super) fn run(config: WorkerConfig, runtime: &Handle) -> Result<(), WorkerError> {
    // The HTTP port is bound first, because a port in use is the most likely mistake.
    let address = config.listen.unwrap_or(config.rendezvous);
    let bound = listen(address).and_then(|http| Ok((http.local_addr()?, http)));
    let (http_address, http) = bound.map_err(|source| WorkerError::Listen { address, source })?;
    let prepared = prepare(&config)?;
    let host = Host::bind(config.location())?;
    (config.announce)(&WorkerEvent::Bound { rendezvous: host.address()? });
    let patience = Patience::new(config.rendezvous_timeout, &config.shutdown);
    let joined = host.gather(&prepared.identity, config.secret.as_ref(), prepared.limits, &patience)?;

    let limits = joined.limits;
    let connected = start::connect(&config, &prepared, joined.ends)?;
    if limits.kv_tokens() < prepared.served.config.max_positions {
        let (found, context) = (limits.kv_tokens(), prepared.served.config.max_positions);
        tracing::warn!(
            "the KV cache has room for {found} tokens, but the model's context is {context}: longer requests are rejected"
        );
    }
    let transport = connected.transport;
    let placement = ExpertPlacement { layout: prepared.identity.experts, replicas: prepared.placement.clone() };
    let placement_digest = prepared.identity.placement.clone();
    let unit = Unit::new(
        config.world,
        config.attention_groups,
        config.targets(),
        UnitLayout { epoch: 0, attention: config.attention, placement, placement_digest },
        limits,
        Timeouts { step: config.collective_timeout, prepared: config.prepared_timeout },
    );
    unit.connect(ports(&unit, &connected, joined.control)?);
    // The engine is kept alive until this function returns, because peers may still be finishing a step.
    let _engine = start_engine(&config, &unit, connected, &prepared, limits)?;

    let app = Arc::new(App {
        unit: unit.clone(),
        served: prepared.served,
        transport,
        shuffles: prepared.shuffle.is_some(),
        tables_root: prepared.tables_root,
        moves_experts: config.expert_memory.is_none() && config.attention_groups == 1,
        force_local_rate: config.force_local_rate.map(ForcedRate::get),
        gate: Gate::new(config.admin_token.clone(), http_address),
    });
    let mut front = Front { status: unit.status(), unit, config };
    runtime.block_on(async {
        let served = match front.come_up().await {
            Ok(true) => {
                (front.config.announce)(&WorkerEvent::Ready {
                    rank: 0,
                    pid: std::process::id(),
                    http: Some(http_address),
                });
                front.serve(http, app).await
            }
            outcome => outcome.map(|_| ()),
        };
        let released = front.release().await;
        served.and(released)
    })
}

/// Creates the connection to each rank, in rank order.
fn ports(unit: &Unit, connected: &Connected, links: Vec<(RankId, TcpStream)>) -> Result<Vec<Port>, WorkerError> {
    let mut ports = vec![Port::Local(connected.inbox.clone())];
    for (rank, stream) in links {
        let unit = unit.clone();
        let link = link::start::<ToRank, FromRank>(&format!("control-{rank}"), stream, move |message| match message {
            Ok(message) => unit.deliver(rank, message),
            Err(end) => unit.closed(rank, &end.to_string()),
        })
        .map_err(WorkerError::Runtime)?;
        ports.push(Port::Remote(link));
    }
    Ok(ports)
}

fn start_engine(
    config: &WorkerConfig,
    unit: &Unit,
    connected: Connected,
    prepared: &Prepared,
    limits: UnitLimits,
) -> Result<JoinHandle<Engine>, WorkerError> {
    let own = RankId::new(0);
    let (sink, end) = (unit.clone(), unit.clone());
    let emit = Box::new(move |message| sink.deliver(own, message));
    let ended = move |ended| match ended {
        Ok(EngineEnd::Stopped) => end.deliver(own, FromRank::Stopped),
        // The unit has already failed, which caused the abort.
        Ok(EngineEnd::Aborted) => {}
        Err(lost) => end.fail(lost),
    };
    let engine = connected.start(config, prepared, limits, emit, ended)?;
    unit.deliver(own, FromRank::Ready);
    Ok(engine)
}

struct Front {
    unit: Unit,
    status: watch::Receiver<UnitStatus>,
    config: WorkerConfig,
}

/// Resolves once `after` has passed since the unit's first failure; never if it is `None`.
async fn given_up(mut status: watch::Receiver<UnitStatus>, after: Option<Duration>) {
    // The unit owns the sender, so this cannot fail.
    let _ = status.wait_for(|status| status.lost.is_some()).await;
    let Some(after) = after else {
        tracing::warn!("requests will get 503 until this process is shut down");
        return std::future::pending().await;
    };
    tracing::warn!(seconds = after.as_secs_f64(), "requests get 503 until this process exits");
    tokio::time::sleep(after).await;
}

impl Front {
    /// Waits until every rank has loaded its model; returns false if the process must stop first.
    async fn come_up(&mut self) -> Result<bool, WorkerError> {
        let world = usize::from(self.unit.world);
        let up = |status: &UnitStatus| status.ready == world || status.lost.is_some() || status.leaving;
        tokio::select! {
            () = self.config.shutdown.requested() => return Ok(false),
            // The unit owns the sender, so this cannot fail.
            _ = self.status.wait_for(up) => {}
        }
        match self.unit.lost() {
            Some(Lost { cause, .. }) => Err(WorkerError::Lost(cause)),
            None => Ok(!self.status.borrow().leaving),
        }
    }

    /// Serves until the process or the unit stops, then lets running requests finish within the grace period. A unit
    /// that lost a rank keeps returning the cause for a while, so that gateways and clients see it.
    async fn serve(&mut self, http: TcpListener, app: Arc<App>) -> Result<(), WorkerError> {
        let listener = tokio::net::TcpListener::from_std(http).map_err(WorkerError::Http)?;
        let closing = Shutdown::default();
        let stop = closing.clone();
        let mut server = tokio::spawn(serve::serve(listener, app, async move { stop.requested().await }));
        tokio::select! {
            () = self.config.shutdown.requested() => {}
            _ = self.status.wait_for(|status| status.leaving) => {}
            () = given_up(self.unit.status(), self.config.exit_after_loss) => {}
            ended = &mut server => {
                let source = ended.map_or_else(std::io::Error::other, |result| match result {
                    Ok(()) => std::io::Error::other("it ended without a stop request"),
                    Err(error) => error,
                });
                return Err(WorkerError::Http(source));
            }
        }
        self.unit.drain();
        let idle = |status: &UnitStatus| status.in_flight == 0;
        if timeout(self.config.grace, self.status.wait_for(idle)).await.is_err() {
            self.unit.cancel_all();
            if timeout(CANCEL_LIMIT, self.status.wait_for(idle)).await.is_err() {
                tracing::warn!("cancelled requests did not end in time");
            }
        }
        closing.request();
        if timeout(CONNECTIONS_LIMIT, &mut server).await.is_err() {
            tracing::warn!("closing open connections");
            server.abort();
        }
        Ok(())
    }

    /// Makes all ranks leave their loops together, then releases them. The ranks of a failed unit have already received
    /// an abort.
    async fn release(&mut self) -> Result<(), WorkerError> {
        let world = usize::from(self.unit.world);
        if self.unit.lost().is_none() {
            self.unit.broadcast(&ToRank::Stop);
            let released = |status: &UnitStatus| status.stopped == world || status.lost.is_some();
            if timeout(STOP_LIMIT, self.status.wait_for(released)).await.is_err() {
                tracing::warn!("ranks did not leave their loops in time");
            }
        }
        let outcome = self.unit.lost().map_or(Ok(()), |Lost { cause, .. }| Err(WorkerError::Lost(cause)));
        self.unit.close();
        let closed = |status: &UnitStatus| status.closed == world - 1;
        // The last messages must be written before this process exits; a rank that hangs does not read them anyway.
        let _ = timeout(CLOSE_LIMIT, self.status.wait_for(closed)).await;
        outcome
    }
}
