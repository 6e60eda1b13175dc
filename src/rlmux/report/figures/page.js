(function(){
var svg=document.getElementById('timeline');if(!svg)return;
document.documentElement.classList.add('js');
var X0=+svg.dataset.x,W=+svg.dataset.w,START=0,SPAN=+svg.dataset.s,k=1,t=0;
var scaled=svg.querySelectorAll('.zoom'),texts=svg.querySelectorAll('[data-a]'),marks=svg.querySelectorAll('[data-m]');
var axis=document.getElementById('axis'),NS='http://www.w3.org/2000/svg',tip=document.getElementById('tip');
function step(raw){var m=Math.pow(10,Math.floor(Math.log10(raw)));return[1,2,2.5,5,10].map(function(f){return f*m})
.filter(function(v){return v>=raw*.999})[0]}
function draw(){
t=Math.min(0,Math.max(t,W-W*k));
scaled.forEach(function(g){g.setAttribute('transform','translate('+t+' 0) scale('+k+' 1)')});
texts.forEach(function(e){var a=+e.dataset.a*k+t,b=+e.dataset.b*k+t,l=Math.max(a,0),r=Math.min(b,W);
var show=r-l>e.textContent.length*5.1+6;e.style.display=show?'':'none';
if(show)e.setAttribute('x',(l+r)/2)});
marks.forEach(function(e){var x=+e.dataset.m*k+t;e.style.display=x<0||x>W?'none':'';
e.setAttribute('transform','translate('+x+' 0)')});
var s=step(SPAN/k/10),from=-t/W/k*SPAN,out='',h=axis.dataset.h;
for(var i=Math.ceil(from/s-1e-9);i*s<=from+SPAN/k+1e-9;i++){var x=(i*s)/SPAN*W*k+t;
out+='<path class="grid" d="M'+x+' 0V'+h+'"/><text class="mute mid" x="'+x+'" y="'+(+h+14)+'">'+(+(i*s).toFixed(6))+' s</text>'}
axis.innerHTML=out;
}
function zoom(f,at){var n=Math.min(Math.max(1,k*f),Math.max(40,SPAN*20));t=at-(at-t)*n/k;k=n;draw()}
function at(e){var r=svg.getBoundingClientRect();return(e.clientX-r.left)*svg.viewBox.baseVal.width/r.width-X0}
svg.addEventListener('wheel',function(e){if(!e.ctrlKey&&!e.metaKey&&!e.altKey)return;e.preventDefault();
zoom(Math.exp(-e.deltaY*.003),at(e))},{passive:false});
var from=null;
svg.addEventListener('pointerdown',function(e){if(e.button)return;from=[at(e),t];svg.setPointerCapture(e.pointerId);
svg.classList.add('held')});
svg.addEventListener('pointermove',function(e){if(from){t=from[1]+at(e)-from[0];draw()}});
['pointerup','pointercancel'].forEach(function(n){svg.addEventListener(n,function(){from=null;svg.classList.remove('held')})});
svg.addEventListener('dblclick',function(e){zoom(2,at(e))});
[['in',1.6],['out',.625],['all',0]].forEach(function(b){document.getElementById('zoom-'+b[0]).onclick=function(){
if(b[1])zoom(b[1],W/2);else{k=1;t=0;draw()}}});
document.addEventListener('pointerover',function(e){
var s=e.target.closest&&e.target.closest('[data-tip],svg *'),title=s&&s.querySelector&&s.querySelector(':scope>title');
if(title){s.dataset.tip=title.textContent;title.remove()}
var text=s&&s.dataset&&s.dataset.tip;tip.style.display=text?'block':'none';if(text)tip.textContent=text});
document.addEventListener('pointermove',function(e){var r=tip.offsetWidth;
tip.style.left=Math.min(e.clientX+14,innerWidth-r-8)+'px';tip.style.top=(e.clientY+16)+'px'});
draw();
})();
