use async_trait::async_trait;
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    },
};
use std::{io::Read, time::Duration};
use ureq::Agent;

/// Longest answer to one request; blocks are smaller, listings too.
const MOST_BODY_BYTES: u64 = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Requests over blocking sockets: a source blocks anyway, and needs no thread of its own for it.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TIMEOUT))
            .proxy(None)
            .build();
        Ok(HttpClient::new(Service(config.new_agent())))
    }
}

#[derive(Debug)]
struct Service(Agent);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let body = body.as_bytes().map(|bytes| bytes.to_vec()).unwrap_or_default();
        let request = ureq::http::Request::from_parts(parts, body);
        let response = self.0.run(request).map_err(|error| HttpError::new(kind(&error), error))?;
        let (parts, body) = response.into_parts();
        let mut content = Vec::new();
        body.into_reader()
            .take(MOST_BODY_BYTES)
            .read_to_end(&mut content)
            .map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error))?;
        Ok(HttpResponse::from_parts(parts, content.into()))
    }
}

fn kind(error: &ureq::Error) -> HttpErrorKind {
    match error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Io(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    }
}
